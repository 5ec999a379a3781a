"""Drafters other than models: the output keeps the target's distribution, for anything they remember."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec.core.types import Draft, pytree
from jspec.drafters.base import Stateless
from jspec.drafters.combine import fallback
from jspec.drafters.signals import TargetSignals
from support import drafters, oracle, shallow, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
DRAWS = 200_000


@pytree
class Memorising:
    """A drafter of two binary tokens whose next draft depends on the token discarded after a rejected one.

    If a position had the same noise whenever it is drafted, draft tokens would not follow the stated distribution.
    """

    vocab: jax.Array
    max_positions = None

    @property
    def vocab_size(self):
        return self.vocab.size

    def init(self, tokens, num_slots):
        return jnp.full(tokens.shape[0], 2)  # 2: nothing was discarded

    def propose(self, state, context, num_draft_tokens):
        first = jnp.array([[0.8, 0.2], [0.5, 0.5], [0.9, 0.1]])[state]
        probs = jnp.stack([first, jnp.full_like(first, 0.5)], axis=1)
        return Draft(jnp.stack([context.draw(k, probs[:, k]) for k in range(2)], axis=1), probs), state

    def commit(self, state, draft, verdict, hidden):
        return jnp.where(verdict.num_accepted == 0, draft.tokens[:, 1], 2)


def test_drafter_may_learn_from_discarded_tokens(report):
    target = toys.MarkovModel(jnp.zeros((2, 2)))  # three fair coins
    batch = np.zeros((DRAWS, 1), int), np.ones(DRAWS, int), jax.random.split(jax.random.key(0), DRAWS)
    drafter = Memorising(jnp.zeros(2))
    out = jspec.speculative_generate(target, drafter, *batch, max_new_tokens=3, num_draft_tokens=2)
    counts = np.bincount(np.asarray(out.tokens) @ [4, 2, 1], minlength=8)
    p = oracle.p_value(counts, np.full(8, 1 / 8))
    report(texts=DRAWS, p=f"{p:.2g}", alpha=oracle.ALPHA, sees_tv=f"{oracle.detectable(DRAWS, 7):.4f}")
    assert p > oracle.ALPHA


SMALLS = {
    "itself": lambda middle, small: jspec.ModelDrafter(middle),
    "model": lambda middle, small: jspec.ModelDrafter(small),
    "ngram": lambda middle, small: jspec.NGramDrafter(),
    "cascade": lambda middle, small: jspec.CascadeDrafter(small, jspec.NGramDrafter(2), 1),
}


def check_cascades(report, toy, prompts, cases):
    """Check that output, distributions and counts equal ``ModelDrafter(middle)``'s, for any drafter of the middle."""
    target, middle, small = toy(0), toy(0, distance=0.1), toy(0, distance=0.2)
    batch, options = prompts([9, 1, 5, 3, 2]), {"max_new_tokens": 32, "num_draft_tokens": 4}
    sampling = jspec.SamplingParams(temperature=np.array([1, 0.7, 0, 1.2, 1]), repetition_penalty=1.1)
    expected = drafters.generate(target, middle, batch, sampling=sampling, **options)
    for name, k in cases:
        drafter = jspec.CascadeDrafter(middle, SMALLS[name](middle, small), num_small_draft_tokens=k)
        out = drafters.generate(target, drafter, batch, sampling=sampling, **options)
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_array_equal(out.stats.accepted_at, expected.stats.accepted_at)
    report(cascades=len(cases), tokens=int(expected.lengths.sum()), accepted=int(expected.stats.accepted.sum()))


def test_cascade_drafts_what_its_middle_model_would(report, toy, prompts):
    check_cascades(report, toy, prompts, [("itself", 3), ("model", 1), ("model", 3), ("ngram", 3), ("cascade", 1)])


@pytest.mark.slow
def test_cascade_drafts_what_its_middle_model_would_in_full(report, toy, prompts):
    check_cascades(report, toy, prompts, [(name, k) for name in SMALLS for k in (1, 2, 3)])


@pytree
class OnAndOff(Stateless):
    """A drafter that drafts token 0 at every other position."""

    vocab_size = None
    max_positions = None

    def propose(self, state, context, num_draft_tokens):
        tokens = jnp.zeros((context.lengths.size, num_draft_tokens), int)
        tells = (context.lengths % 2 == 0)[:, None, None]
        return Draft(tokens, jax.nn.one_hot(tokens, context.vocab_size) * tells), state


@pytree
class Watched(jspec.ModelDrafter):
    """A drafter that records in `ERRORS` how far its first distribution is from the one without a cache."""

    def propose(self, cache, context, num_draft_tokens):
        draft, cache = super().propose(cache, context, num_draft_tokens)
        last = (context.lengths - 1)[:, None, None]
        law = jax.nn.softmax(jnp.take_along_axis(self.model(context.tokens), last, axis=1)[:, 0] + ZERO_IS_LIKELY)
        jax.debug.callback(lambda error: ERRORS.append(float(error)), jnp.abs(law - draft.probs[:, 0]).max())
        return draft, cache


@pytree
class Brief(Watched):
    """A drafter that is asked for at most one token, as heads are asked for few."""

    max_chain_length = 1


ERRORS = []
ZERO_IS_LIKELY = np.array([2.5] + 7 * [0.0], np.float32)


def worst_law(k, small_k, kind=Watched):
    """Return the largest error of a drafter that falls back to a model, within a cascade if `small_k` is not 0."""
    ERRORS.clear()
    jax.clear_caches()
    target = toys.tiny_llama(10)
    drafter = jspec.FallbackDrafter(OnAndOff(), kind(toys.tiny_llama(12)))
    if small_k:
        drafter = jspec.CascadeDrafter(target, drafter, small_k)
    sampling = jspec.SamplingParams(logit_bias=ZERO_IS_LIKELY)
    for seed in range(8):  # one row at a time: within a cascade, it would read more while waiting for other rows
        batch = np.array([[1, 2]]), np.array([2]), jax.random.split(jax.random.key(seed), 1)
        drafters.generate(target, drafter, batch, max_new_tokens=64, num_draft_tokens=k, sampling=sampling)
    jax.effects_barrier()
    assert len(ERRORS) > 8
    return max(ERRORS)


@pytest.mark.parametrize(
    ("k", "small_k", "kind"),
    [
        (3, 0, Watched),
        (4, 0, Brief),
        (4, 5, Watched),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 2, Watched), (4, 3, Watched), (4, 5, Brief)]),
    ],
)
def test_fallback_reads_tokens_that_other_part_drafted(report, monkeypatch, k, small_k, kind):
    error = worst_law(k, small_k, kind)
    # Planted bug: it reads as many tokens as if it had drafted all of them itself.
    monkeypatch.setattr(fallback, "dataclasses", SimpleNamespace(replace=lambda context, **_: context))
    planted = worst_law(k, small_k, kind)
    report(error=f"{error:.1e}", planted=f"{planted:.2f}")
    assert error < 1e-5 and planted > 0.01


@pytree
class Lawless(Stateless):
    """A drafter of tokens without distributions, which only "coupled" can verify."""

    vocab_size = max_positions = None

    def propose(self, state, context, num_draft_tokens):
        tokens = jnp.zeros((context.lengths.size, num_draft_tokens), jnp.int32)
        return Draft(tokens, None, None, jnp.ones(tokens.shape, bool)), state


def test_fallback_requires_distributions(toy, prompts):
    options = {"max_new_tokens": 4, "accept": "coupled"}
    assert drafters.generate(toy(0), Lawless(), prompts([3]), **options).stats.judged[0]
    for pair in ((Lawless(), jspec.NGramDrafter()), (jspec.NGramDrafter(), Lawless())):
        with pytest.raises(
            ValueError, match="Lawless drafts tokens without distributions, but a FallbackDrafter needs them"
        ):
            drafters.generate(toy(0), jspec.FallbackDrafter(*pair), prompts([3]), **options)


def test_parts_may_be_models_and_mistakes_are_reported(toy, prompts):
    target, draft, batch = toy(0), toy(0, distance=0.1), prompts([3, 2])
    for wrapped, bare in (
        (
            jspec.FallbackDrafter(jspec.NGramDrafter(), jspec.ModelDrafter(draft)),
            jspec.FallbackDrafter(jspec.NGramDrafter(), draft),
        ),
        (jspec.CascadeDrafter(target, jspec.ModelDrafter(draft)), jspec.CascadeDrafter(target, draft)),
    ):
        expected, out = (drafters.generate(target, part, batch, max_new_tokens=8) for part in (wrapped, bare))
        np.testing.assert_array_equal(out.tokens, expected.tokens)
    with pytest.raises(TypeError, match="draft is the class NGramDrafter; pass an instance of it"):
        jspec.FallbackDrafter(jspec.NGramDrafter, draft)
    for drafter, message in (
        (jspec.NGramDrafter, r"draft is the class NGramDrafter; pass an instance of it"),
        (jspec.ModelDrafter(jspec.NGramDrafter()), "model is of type NGramDrafter; pass"),
        (jspec.CascadeDrafter(jspec.ModelDrafter(draft), draft), "middle is of type ModelDraf"),
    ):
        with pytest.raises(TypeError, match=message):
            jspec.speculative_generate(target, drafter, *batch, max_new_tokens=4)


@pytree
class Counting(Stateless):
    """A drafter of token 0, in 8-bit integers, that counts its calls of `commit`."""

    vocab_size = None
    max_positions = 100

    def init(self, tokens, num_slots):
        return jnp.int32(0)

    def propose(self, state, context, num_draft_tokens):
        tokens = jnp.zeros((context.lengths.size, num_draft_tokens), jnp.uint8)
        return Draft(tokens, jax.nn.one_hot(tokens, context.vocab_size, dtype=jnp.float16)), state

    def commit(self, state, draft, verdict, hidden):
        return state + 1


def test_parts_receive_signals_and_their_limits_hold(toy, prompts):
    """This holds within pairs and cascades too. A part's arrays may have any dtype there, as they may alone."""
    target, batch = toy(0), prompts([3, 2])
    pair = jspec.FallbackDrafter(Counting(), jspec.FallbackDrafter(Counting(), toy(1)))
    assert pair.commit((1, (2, ())), None, None, TargetSignals(None)) == (2, (3, ()))
    cascade = jspec.CascadeDrafter(toy(1), Counting(), 1)
    state, _ = toys.first_round(
        target, cascade, *map(jnp.asarray, batch[:2]), batch[2], toys.both_transforms(jspec.SamplingParams(), 2), 3
    )
    assert state.drafter[1] > 0
    for drafter in (Counting(), pair, cascade):
        assert drafter.max_positions == 100
        drafters.generate(target, drafter, batch, max_new_tokens=8)
        with pytest.raises(ValueError, match="but the draft model has 100"):
            drafters.generate(target, drafter, batch, max_new_tokens=98)


def test_nested_fallbacks_use_smallest_budget(toy, prompts):
    target, lookup = toy(0), jspec.NGramDrafter()
    drafter = jspec.FallbackDrafter(lookup, jspec.FallbackDrafter(lookup, toy(0, distance=0.1)))
    batch, options = prompts([1]), {"max_new_tokens": 4, "num_draft_tokens": 8}
    out = drafters.generate(target, drafter, batch, accept="coupled", **options)
    np.testing.assert_array_equal(out.tokens, jspec.generate(target, *batch, max_new_tokens=4).tokens)


def test_failed_lookup_counts_as_no_draft(toy, prompts):
    batch = prompts([3, 2])
    out = drafters.generate(toy(0), jspec.NGramDrafter(60, 60), batch, max_new_tokens=16, num_draft_tokens=4)
    assert out.stats.drafted.sum() == 0 and (out.stats.rounds == 16).all()


def test_each_part_of_fallback_drafts_up_to_its_maximum(toy, prompts, monkeypatch):
    """The target drafts for itself, so all its draft tokens are accepted; the heads beside it draft only three."""
    batch, options = prompts([3, 2]), {"max_new_tokens": 24, "num_draft_tokens": 4, "accept": "coupled"}
    heads = jspec.MedusaDrafter.untrained(toy(0), 3, rngs=nnx.Rngs(0))
    out = drafters.generate(toy(0), jspec.FallbackDrafter(toy(0), heads), batch, **options)
    assert out.stats.judged_at[:, 3].all() and jspec.FallbackDrafter(heads, heads).max_chain_length == 3
    # A row's budget may exceed what a part is asked for, which once made a cascade draft forever.
    cascade, nothing = jspec.CascadeDrafter(toy(0), toy(0), 1), jspec.NGramDrafter(60, 60)
    monkeypatch.setattr(jspec.CascadeDrafter, "max_chain_length", 2, raising=False)
    options["num_draft_tokens"] = jspec.UpTo(4)
    for drafter in (jspec.FallbackDrafter(nothing, cascade), jspec.HorizontalDrafter(cascade, nothing, 2)):
        out = drafters.generate(toy(0), drafter, batch, **options)
        np.testing.assert_array_equal(out.tokens, jspec.generate(toy(0), *batch, max_new_tokens=24).tokens)
        assert out.stats.rounds[0] == 8 and out.stats.drafted[0] == 16


def looked_up(tokens, max_ngram, min_ngram, k):
    """Return what `NGramDrafter` should copy after the list `tokens`, or None, by brute force."""
    best = None
    for size in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(tokens) - 2, size - 2, -1):
            if best is None and tokens[end - size + 1 : end + 1] == tokens[len(tokens) - size :]:
                best = end
    if best is None:
        return None
    text = list(tokens)
    for i in range(k):
        text.append(text[best + 1 + i])
    return text[len(tokens) :]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_lookup_finds_longest_and_latest_match(tokens, max_ngram, min_ngram):
    min_ngram = min(min_ngram, max_ngram)
    drafter = jspec.NGramDrafter(max_ngram, min_ngram)
    row = np.array([*tokens, *[7] * (16 - len(tokens))], np.int32)
    copied, found = (part[0] for part in drafter._copy(jnp.asarray(row), jnp.int32(len(tokens)), 1, 4))
    expected = looked_up(tokens, max_ngram, min_ngram, 4)
    assert bool(found) == (expected is not None)
    if found:
        assert copied.tolist() == expected


def test_drafters_from_docs_work(toy, prompts, capsys, monkeypatch):
    """The page runs as one program, and so does its custom drafter of twenty lines, as a user might write it."""
    monkeypatch.setattr(jspec, "demo_pair", shallow.pair)
    page = (Path(__file__).parents[2] / "docs" / "drafters.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert capsys.readouterr().out.endswith("\n[1.]\n")  # this output has no token twice in a row
    target, (tokens, lengths, keys) = toy(0), prompts([4, 2])
    coupled = drafters.generate(target, names["Again"](), (tokens, lengths, keys), max_new_tokens=32, accept="coupled")
    plain = jspec.generate(target, tokens, lengths, keys, max_new_tokens=32)
    np.testing.assert_array_equal(coupled.tokens, plain.tokens)


def test_tables_hold_smoothed_counts():
    tokens = [0, 1, 0, 1, 0, 2]
    unigram = jspec.UnigramDrafter.from_tokens(tokens, 4, smoothing=2.0)
    np.testing.assert_allclose(np.exp(unigram.logits), np.array([3.5, 2.5, 1.5, 0.5]) / 8, rtol=1e-6)
    bigram = jspec.BigramDrafter.from_tokens(tokens, 4, smoothing=2.0)
    prior = np.array([3.5, 2.5, 1.5, 0.5]) / 8
    counts = np.array([[0, 2, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    expected = (counts + 2 * prior) / (counts.sum(1, keepdims=True) + 2)
    np.testing.assert_allclose(np.exp(bigram.logits), expected, rtol=1e-5)
