"""Draft models with reduced vocabularies: their distributions, exactness, constraints, files, and rejected input."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jspec
from jspec import Tree, TreeDrafter
from jspec.acceptance import RULES
from jspec.core.types import pytree
from jspec.drafters import frequent_tokens
from jspec.drafters.draft_length import DEFAULT
from jspec.drafters.standalone import model as module
from jspec.engine import Engine, Request
from support import oracle, toys
from support.exits import LENGTHS, TOKENS, K, drafted
from support.law import plain
from support.matrix import PROMPTS, check_texts, pair, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")
V, IDS = 8, np.array([6, 1, 7, 3])  # not in order, so that a wrong order is detected
MODELS = {
    "untied": lambda: toys.tiny_llama(11),
    "tied": lambda: toys.tiny_llama(11, tie_word_embeddings=True),
    "int8": lambda: jspec.quantize(toys.tiny_llama(11)),
    "tied int8": lambda: jspec.quantize(toys.tiny_llama(11, tie_word_embeddings=True)),
}
SAMPLINGS = ({}, {"temperature": 0.4}, {"temperature": 1.7}, {"temperature": 0.0}, {"top_p": 0.6})


def few(model):
    return jspec.ModelDrafter.with_vocabulary(model, IDS)


def farthest(model, **sampling):
    """Return the largest distance of a draft's distribution from that of the full logits, restricted in float64."""
    draft, after = drafted(few(model), **sampling), LENGTHS[:, None] + np.arange(K)
    text = np.pad(TOKENS, ((0, 0), (0, K)))
    np.put_along_axis(text, after, draft.tokens, axis=1)
    logits = np.take_along_axis(np.asarray(plain(model, text), np.float64), after[..., None] - 1, axis=1)
    restricted = np.where(np.isin(np.arange(V), IDS), logits, -np.inf)
    expected = np.array([[oracle.sampling_law(row, **sampling) for row in rows] for rows in restricted])
    return np.abs(draft.probs - expected).max()


@pytest.mark.parametrize("name", MODELS)
def test_distribution_is_that_of_the_full_draft_restricted_to_the_vocabulary(name, report):
    worst = max(farthest(MODELS[name](), **sampling) for sampling in SAMPLINGS)
    report(farthest=f"{worst:.1e}")
    assert worst < 1e-5


def nonzero_outside(monkeypatch):
    monkeypatch.setattr(
        module, "spread_logits", lambda logits, ids: jnp.take(jnp.pad(logits, ((0, 0), (0, 0), (0, 1))), ids, axis=-1)
    )


def permuted(monkeypatch):
    draft_ids_of = module.draft_ids_of
    monkeypatch.setattr(module, "draft_ids_of", lambda tokens, size: draft_ids_of(np.sort(tokens), size))


@pytest.mark.parametrize("plant", [nonzero_outside, permuted])
def test_planted_bug_is_seen_in_the_distribution(monkeypatch, plant):
    plant(monkeypatch)
    assert farthest(MODELS["untied"]()) > 0.01


TREES = {"chain": None, "wide tree": Tree.branching((3, 1))}  # wider than the vocabulary below
LAWS = [(kind, rule) for kind in TREES for rule in RULES if not (kind == "wide tree" and rule == "block")]


@pytest.mark.parametrize(("kind", "rule"), LAWS)
def test_three_tokens_have_target_joint_distribution(report, kind, rule):
    drafter, length = jspec.ModelDrafter.with_vocabulary(pair()[1], [5, 2]), 2
    if TREES[kind] is not None:
        drafter, length = TreeDrafter(drafter, TREES[kind], replacement=rule == "k-seq"), DEFAULT
    check_texts(report, text_p_values(drafter, rule, 8_192, length), 8_192, len(LAWS) + 1)


@pytree
class Leaking(jspec.ModelDrafter):
    """A drafter that declares the full draft model's distribution, but draws its tokens from the reduced one."""

    full: jspec.Llama

    def propose(self, state, context, num_draft_tokens):
        draft, state = super().propose(state, context, num_draft_tokens)
        alike = jspec.ModelDrafter(self.full)
        other, _ = alike.propose(alike.init(context.tokens, context.tokens.shape[1]), context, num_draft_tokens)
        return dataclasses.replace(draft, probs=other.probs), state


def test_planted_mass_outside_the_vocabulary_is_seen_in_the_output():
    model = pair()[1]
    reduced = jspec.ModelDrafter.with_vocabulary(model, [5, 2])
    drafter = Leaking(reduced.model, model, draft_ids=reduced.draft_ids)
    assert min(text_p_values(drafter, "rejection", 8_192, 1).values()) < oracle.ALPHA


class Never:
    """A constraint that forbids all tokens that can be drafted."""

    def allowed(self):
        return np.array([sum(1 << token for token in range(V) if token not in IDS)], np.uint32)

    def consume(self, token):
        return token not in IDS

    def rollback(self, count):
        pass


@pytest.mark.parametrize("tree", [None, Tree.branching((2, 1))], ids=["chain", "tree"])
def test_constraint_that_forbids_the_whole_vocabulary_drafts_nothing(tree):
    target, draft = pair()
    requests = [Request(PROMPTS[i], 12, key=jax.random.key(i), constraint=Never if i % 2 else None) for i in range(4)]
    drafter, found = few(draft), []
    for drafts in (None, drafter if tree is None else TreeDrafter(drafter, tree)):
        with Engine(target, drafts, slots=3, max_length=40, chunks=(8,), rounds=3) as engine:
            found.append(engine.generate(requests))
    for one, other in zip(*found, strict=True):
        assert one.finish_reason == other.finish_reason == "length"
        assert one.tokens == other.tokens and np.isfinite(other.logprobs).all()
    assert not {*IDS} & {token for i in (1, 3) for token in found[1][i].tokens}


@pytest.mark.parametrize("rule", RULES)
def test_bias_that_forbids_the_whole_vocabulary_drafts_nothing(prompts, rule):
    target, draft = pair()
    bias = np.where(np.isin(np.arange(V), IDS), -np.inf, 0).astype(np.float32)
    options = {"max_new_tokens": 9, "sampling": jspec.SamplingParams(temperature=[1.0, 0.0], logit_bias=bias)}
    batch = prompts([4, 2], vocab_size=V)
    out = jspec.speculative_generate(target, few(draft), *batch, accept=rule, num_draft_tokens=2, **options)
    assert not out.stats.drafted.any() and not out.stats.invalid.any() and np.isfinite(out.logprobs).all()
    assert not np.isin(out.tokens, IDS).any()
    if rule == "coupled":
        np.testing.assert_array_equal(out.tokens, jspec.generate(target, *batch, **options).tokens)


@pytest.mark.parametrize("length", [2, jspec.WhileConfident(2, 0.3, first=0.3)], ids=["fixed", "confident"])
def test_vocabulary_of_padding_drafts_nothing(toy, prompts, length):
    """The draft's vocabulary is longer than the target's by padding, and only padding can be drafted."""
    drafter = jspec.ModelDrafter.with_vocabulary(toy(1, vocab_size=64), [62, 63])
    out = jspec.speculative_generate(toy(0), drafter, *prompts([4, 2]), max_new_tokens=5, num_draft_tokens=length)
    assert not out.stats.accepted.any() and (out.lengths == 5).all() and np.isfinite(out.logprobs).all()


@pytest.mark.parametrize("name", MODELS)
def test_drafter_is_restored_by_pickle_and_orbax(tmp_path, name):
    leaves, structure = jax.tree.flatten(drafter := few(MODELS[name]()))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "drafter", leaves)
        checkpointer.wait_until_finished()
        stored = checkpointer.restore(tmp_path / "drafter", leaves)
    for found in (pickle.loads(pickle.dumps(drafter)), structure.unflatten(stored)):
        assert jax.tree.structure(found) == jax.tree.structure(drafter)
        jax.tree.map(np.testing.assert_array_equal, found, drafter)
    assert drafter.model.head.num_tokens == len(IDS)


def test_original_model_is_unchanged_and_shared():
    model = MODELS["tied"]()
    drafter = few(model)
    assert model.lm_head is None and model.head.num_tokens == V
    assert drafter.model.embed_tokens.weight[...] is model.embed_tokens.weight[...]


def test_reduced_model_is_rejected_as_target():
    model = few(MODELS["untied"]()).model
    batch = np.zeros((1, 2), np.int32), np.array([2]), jax.random.split(jax.random.key(0), 1)
    calls = (
        lambda: jspec.generate(model, *batch, max_new_tokens=2),
        lambda: jspec.speculative_generate(model, jspec.NGramDrafter(), *batch, max_new_tokens=2),
        lambda: Engine(model, None, slots=1),
        lambda: jspec.tune(model, jspec.NGramDrafter(), *batch, max_new_tokens=64),
    )
    for call in calls:
        with pytest.raises(
            ValueError, match=rf"target's output head holds {len(IDS)} of {V} tokens; pass the original"
        ):
            call()


def test_reduced_drafter_is_neither_saved_nor_trained(tmp_path):
    drafter = few(MODELS["untied"]())
    with pytest.raises(ValueError, match="has a reduced vocabulary, which a Hugging Face directory cannot hold; save"):
        drafter.save(tmp_path / "model")
    with pytest.raises(ValueError, match="has a reduced vocabulary"):
        jspec.MultiDrafter([drafter, drafter]).save(tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="has a reduced vocabulary and cannot be trained; train the original"):
        jspec.online.Learner(toys.tiny_llama(0), drafter)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], r"tokens must be at least 1 token ids in one dimension; got float64 of shape \(0,\)"),
        ([[1]], r"got int64 of shape \(1, 1\)"),
        ([1.0], "got float64"),
        ([True], "got bool"),
        ([1, 3, 1], "Token 1 occurs 2 times in tokens; pass each token once"),
        ([8], "range from 8 to 8, outside the vocabulary of 8"),
        ([-1, 2], "range from -1 to 2, outside the vocabulary of 8"),
    ],
)
def test_invalid_vocabulary_is_rejected(tokens, message):
    with pytest.raises(ValueError, match=message):
        jspec.ModelDrafter.with_vocabulary(MODELS["untied"](), tokens)


def test_other_models_are_rejected():
    with pytest.raises(TypeError, match="model is of type NGramDrafter; pass a model"):
        jspec.ModelDrafter.with_vocabulary(jspec.NGramDrafter(), [1])
    with pytest.raises(ValueError, match="holds 4 of 8 tokens, so its vocabulary is already reduced; pass the orig"):
        few(few(MODELS["untied"]()).model)


def test_model_with_reduced_head_is_not_a_draft():
    with pytest.raises(ValueError, match=r"head holds 4 of 8 tokens; pass the drafter that"):
        module.as_drafter(few(MODELS["untied"]()).model)


def test_most_frequent_tokens_are_chosen():
    text = [5, 5, 5, 2, 2, 7, 7, 0]
    assert frequent_tokens(text, 2, 9).tolist() == [2, 5]
    assert frequent_tokens(text, 3, 9, always=[8, 8]).tolist() == [2, 5, 8]
    assert frequent_tokens(text, 5, 9, always=(0,)).tolist() == [0, 1, 2, 5, 7]
    assert frequent_tokens(text, 9, 9).tolist() == list(range(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "tokens must be at least 1 token ids"),
        ({"tokens": [9]}, "range from 9 to 9, outside the vocabulary of 9"),
        ({"always": [9]}, "range from 9 to 9, outside the vocabulary of 9"),
        ({"count": 0}, "count must be an int of at least 1; got 0"),
        ({"count": 10}, "count=10 must be at least 0, the number of tokens in always, and at most 9"),
        ({"count": 1, "always": [1, 2]}, "count=1 must be at least 2, the number of tokens in always, and at most 9"),
    ],
)
def test_invalid_choices_of_tokens_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        frequent_tokens(**{"tokens": [1, 2], "count": 2, "vocab_size": 9} | change)
