"""One drafter after another: what each must read, what the second may draft, and what is rejected."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from support import drafters, toys
from support.exits import LENGTHS, TOKENS, K, drafted

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("length", [jspec.UpTo(4), pytest.param(jspec.Heuristic(4), marks=pytest.mark.slow)], ids=str)
def test_target_as_every_part_is_always_accepted(report, prompts, length):
    """This holds for each of the drafters, with any cache, and for any drafts of another before or since."""
    target = toys.tiny_llama(10)
    whole = jspec.EarlyExitDrafter(2)
    drafter = jspec.HorizontalDrafter(target, jspec.HorizontalDrafter(whole, target, 1), 1)
    sampling = jspec.SamplingParams(temperature=[1.0, 0.7, 1.0], repetition_penalty=1.3, max_tokens=[0, 13, 0])
    out = drafters.generate(
        target, drafter, prompts([3, 4, 1], vocab_size=8), max_new_tokens=40, num_draft_tokens=length, sampling=sampling
    )
    report(drafted=int(out.stats.drafted.sum()))
    np.testing.assert_array_equal(out.stats.accepted, out.stats.drafted)
    if length == jspec.UpTo(4):
        np.testing.assert_array_equal(out.stats.rounds, [8, 3, 8])


def test_each_part_drafts_its_share():
    """The first drafts what it would alone, and the second what it would after that.

    If the first drafts nothing, nothing follows.
    """
    table = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8)), jnp.float32)
    first, second = jspec.BigramDrafter(table[0]), jspec.BigramDrafter(table[1])
    alone, mixed = drafted(first), drafted(jspec.HorizontalDrafter(first, second, 2))
    np.testing.assert_array_equal(mixed.tokens[:, :2], alone.tokens[:, :2])
    np.testing.assert_allclose(mixed.probs[:, :2], alone.probs[:, :2], atol=1e-6)
    np.testing.assert_allclose(mixed.probs[:, 2], jax.nn.softmax(table[1])[mixed.tokens[:, 1]], atol=1e-6)
    np.testing.assert_array_equal(drafted(jspec.HorizontalDrafter(first, second, K + 4)).tokens, alone.tokens)
    silent = jspec.BigramDrafter(table[0].at[TOKENS[0, LENGTHS[0] - 1]].set(-jnp.inf))
    after = drafted(jspec.HorizontalDrafter(silent, second, 1))
    guessed = after.probs.any(-1)
    assert 0 < guessed[:, 0].sum() < 5
    np.testing.assert_array_equal(guessed, np.repeat(guessed[:, :1], K, axis=1))


def test_mistakes_are_reported(toy):
    tree = jspec.TreeDrafter(toy(1), jspec.Tree.branching((2,)))
    for make, error, message in (
        (lambda: jspec.HorizontalDrafter(toy(0), toy(1), 0), ValueError, "at must be an int of at least 1; got 0"),
        (lambda: jspec.HorizontalDrafter(toy(0), tree, 1), TypeError, "second is of type TreeDrafter, which drafts a"),
    ):
        with pytest.raises(error, match=message):
            make()
