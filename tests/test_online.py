"""Learning while serving: guesses get better from request to request, and the texts are what they always were."""

import eagle_heads
import heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from flax import nnx

import jspec
from jspec.drafters import EagleDrafter

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET, V = toys.tiny_llama(0, 3), 8
TARGET.lm_head.weight.set_value(3 * TARGET.lm_head.weight[...])


@pytest.mark.parametrize(("kind", "requests"), [("eagle", 12), pytest.param("medusa", 36, marks=pytest.mark.slow)])
def test_what_was_served_is_learned_from(prompts, kind, requests, report):
    made = {"eagle": lambda: EagleDrafter(eagle_heads.eagle(TARGET)), "medusa": lambda: heads.medusa(TARGET, 3)}
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
    jax.tree.map(np.testing.assert_array_equal, before, began)  # who began with it still has it


def test_texts_wait_until_there_are_enough(prompts):
    learner = jspec.online.Learner(TARGET, EagleDrafter(eagle_heads.eagle(TARGET)), batch=3, length=8)
    batch = prompts([2, 3], vocab_size=V)
    out = jspec.generate(TARGET, *batch, max_new_tokens=12)
    first, asked = learner.drafter, [row[:size].tolist() for row, size in zip(batch[0], batch[1], strict=True)]
    learner.learn(asked[:1], jax.tree.map(lambda leaf: leaf[:1], out))  # two parts of 8 tokens
    assert learner.drafter is first and not learner.scores
    learner.learn(asked[1:], jax.tree.map(lambda leaf: leaf[1:], out))
    assert learner.drafter is not first and len(learner.scores) == 1


def test_what_cannot_learn():
    with pytest.raises(TypeError, match="NGramDrafter cannot be trained; expected one of BlockwiseDrafter, Eagle"):
        jspec.online.Learner(TARGET, jspec.NGramDrafter())
    with pytest.raises(ValueError, match="loss is 'l2'; expected one of kl"):
        jspec.online.Learner(TARGET, EagleDrafter(eagle_heads.eagle(TARGET)), loss="l2")
    with pytest.raises(ValueError, match="HydraDrafter has 2 heads, and a draft of 4 tokens"):
        jspec.online.Learner(TARGET, jspec.HydraDrafter.untrained(TARGET, 2, rngs=nnx.Rngs(0)))
    learner = jspec.online.Learner(TARGET, EagleDrafter(eagle_heads.eagle(TARGET)))
    out = jspec.generate(TARGET, jnp.ones((1, 2), int), [2], jax.random.split(jax.random.key(0), 1), max_new_tokens=4)
    with pytest.raises(ValueError, match="There are 2 prompts and 1 texts; give the prompt of each"):
        learner.learn([[1], [2]], out)
