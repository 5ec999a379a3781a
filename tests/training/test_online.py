"""Learning while serving: drafts improve from request to request, and outputs stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.drafters import EagleDrafter
from jspec.training import kinds
from support import eagle_heads, heads, oracle, toys
from support.law import exact_law

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET, V = toys.tiny_llama(0, 3), 8
TARGET.lm_head.weight.set_value(3 * TARGET.lm_head.weight[...])


@pytest.mark.parametrize(
    ("kind", "requests"), [("eagle", 12), ("block", 24), pytest.param("medusa", 36, marks=pytest.mark.slow)]
)
def test_learning_from_served_texts_raises_acceptance(prompts, kind, requests, report):
    made = {
        "eagle": lambda: EagleDrafter(eagle_heads.eagle(TARGET)),
        "block": lambda: kinds.of_block(TARGET, None, 3, 0),
        "medusa": lambda: heads.medusa(TARGET, 3),
    }
    began = made[kind]()
    before = jax.tree.map(np.asarray, began)
    learner = jspec.online.Learner(TARGET, began, rate=0.02, depth=3, batch=8, length=32)
    accepted = []
    for request in range(requests):
        batch = prompts([1 + i % 4 for i in range(8)], seed=request, vocab_size=V)
        asked = [row[:size].tolist() for row, size in zip(batch[0], batch[1], strict=True)]
        options = {"max_new_tokens": 24, "accept": "coupled"}
        out = jspec.speculative_generate(TARGET, learner.drafter, *batch, num_draft_tokens=3, **options)
        np.testing.assert_array_equal(out.tokens, jspec.generate(TARGET, *batch, max_new_tokens=24).tokens)
        accepted.append(float(out.stats.accepted.sum() / out.stats.judged.sum()))
        learner.learn(asked, out)
    said = [float(score.acceptance[0]) for score in learner.scores]
    report(accepted=f"{accepted[0]:.2f} to {accepted[-1]:.2f}", said=f"{said[0]:.2f} to {said[-1]:.2f}")
    assert len(said) == requests and np.mean(said[-3:]) > np.mean(said[:2]) + 0.1
    assert np.mean(accepted[-3:]) > np.mean(accepted[:2]) + 0.1
    jax.tree.map(np.testing.assert_array_equal, before, began)  # the original drafter is unchanged


def test_texts_with_new_keys_have_target_distribution(report):
    """Weights learned from a text know its key's noise: outputs with that key are biased, those with new keys exact."""
    target, drafter, count, prompt = toys.tiny_llama(0, 2), heads.medusa(toys.tiny_llama(0, 2), 1), 40_000, [1, 2]
    learner = jspec.online.Learner(target, drafter, rate=0.1, depth=1, batch=1, length=8)
    begun = jax.tree.map(jnp.copy, learner._state)

    def texts(drafter, keys):
        batch = np.tile(prompt, (len(keys), 1)), np.full(len(keys), 2), keys
        return jspec.speculative_generate(target, drafter, *batch, max_new_tokens=2, num_draft_tokens=1)

    def learned(text):
        learner.drafter, learner._state = drafter, jax.tree.map(jnp.copy, begun)
        for _ in range(20):
            learner.learn([prompt], jax.tree.map(lambda leaf: leaf[text : text + 1], first))
        return learner.drafter

    keys, others = (jax.random.split(jax.random.key(seed), count) for seed in (5, 6))
    first = jax.device_get(texts(drafter, keys))
    of_text, found = first.tokens @ [V, 1], {"known": np.zeros(V**2, int), "new": np.zeros(V**2, int)}
    most = np.bincount(of_text).max()
    for text in np.unique(of_text):
        same = np.flatnonzero(of_text == text)
        guesser, rows = learned(same[0]), np.resize(same, most)  # one shape, so one program
        for name, which in (("known", keys), ("new", others)):
            again = np.asarray(texts(guesser, which[rows]).tokens)[: len(same)] @ [V, 1]
            found[name] += np.bincount(again, minlength=V**2)
    law = exact_law(target, prompt, {}).reshape(V**2, -1).sum(1)
    p_values = {name: oracle.p_value(counts, law) for name, counts in found.items()}
    report(texts=count, **{name: f"{p:.1g}" for name, p in p_values.items()})
    assert p_values["new"] > oracle.ALPHA and p_values["known"] < 1e-6


def test_tokens_without_target_distribution_are_not_learned(prompts):
    """Tokens without a target distribution teach nothing, and do not spoil what other tokens teach."""
    target = toys.tiny_llama(0, 2)
    target.embed_tokens.weight.set_value(target.embed_tokens.weight[...].at[:, 7].set(jnp.inf))
    drafter = heads.medusa(target, 2)
    learner = jspec.online.Learner(target, drafter, depth=2, batch=2, length=8)
    out = jspec.generate(TARGET, *prompts([2, 2], vocab_size=7), max_new_tokens=6)
    whole = jax.tree.map(lambda leaf: np.array(leaf), out)
    whole.tokens[:] = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 5, 6]]
    learner.learn([[1, 2], [1, 2]], whole)
    assert learner.scores[0].tokens.tolist() == [6, 5] and np.isfinite(learner.scores[0].loss).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.drafter))
    learned = learner.drafter
    learner.learn([[7, 7], [7, 7]], whole)
    assert learner.scores[1].tokens.tolist() == [0, 0]
    for leaf, before in zip(jax.tree.leaves(learner.drafter), jax.tree.leaves(learned), strict=True):
        np.testing.assert_array_equal(leaf, before)  # not even the optimizer's state changes them


def test_learning_waits_for_a_full_batch(prompts):
    learner = jspec.online.Learner(TARGET, EagleDrafter(eagle_heads.eagle(TARGET)), batch=3, length=8)
    batch = prompts([2, 3], vocab_size=V)
    out = jspec.generate(TARGET, *batch, max_new_tokens=12)
    first, asked = learner.drafter, [row[:size].tolist() for row, size in zip(batch[0], batch[1], strict=True)]
    learner.learn(asked[:1], jax.tree.map(lambda leaf: leaf[:1], out))  # two parts of 8 tokens
    assert learner.drafter is first and not learner.scores
    learner.learn(asked[1:], jax.tree.map(lambda leaf: leaf[1:], out))
    assert learner.drafter is not first and len(learner.scores) == 1


def test_invalid_learners_are_rejected():
    with pytest.raises(TypeError, match="NGramDrafter cannot be trained; expected one of BlockDrafter, Blockwise"):
        jspec.online.Learner(TARGET, jspec.NGramDrafter())
    with pytest.raises(ValueError, match="loss is 'l2'; expected one of kl"):
        jspec.online.Learner(TARGET, EagleDrafter(eagle_heads.eagle(TARGET)), loss="l2")
    with pytest.raises(ValueError, match="HydraDrafter has 2 heads, but a draft of 4 consecutive tokens"):
        jspec.online.Learner(TARGET, jspec.HydraDrafter.untrained(TARGET, 2, rngs=nnx.Rngs(0)))
    learner = jspec.online.Learner(TARGET, EagleDrafter(eagle_heads.eagle(TARGET)))
    out = jspec.generate(TARGET, jnp.ones((1, 2), int), [2], jax.random.split(jax.random.key(0), 1), max_new_tokens=4)
    with pytest.raises(ValueError, match="There are 2 prompts but 1 outputs; pass one prompt for each output"):
        learner.learn([[1], [2]], out)
