"""Drafting with the target's own layers and mixing two drafters' distributions, each against a plain version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.decoding.program import decode_program
from support import drafters, toys
from support.exits import LENGTHS, TOKENS, K, drafted
from support.shallow import first_layers

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize(
    ("rule", "k"),
    [
        ("rejection", 1),
        ("block", 3),
        ("coupled", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("rejection", 3), ("block", 1), ("coupled", 1)]),
    ],
)
def test_early_exit_drafts_like_model_of_first_layers(report, rule, k):
    target, batch = toys.tiny_llama(10), (TOKENS, LENGTHS, jax.random.split(jax.random.key(1), 5))
    options = {"max_new_tokens": 40, "num_draft_tokens": k, "accept": rule}
    expected = drafters.generate(target, first_layers(target, 1), batch, **options)
    out = drafters.generate(target, jspec.EarlyExitDrafter(1), batch, **options)
    jax.tree.map(np.testing.assert_array_equal, (out.tokens, out.stats), (expected.tokens, expected.stats))
    everything = drafters.generate(target, jspec.EarlyExitDrafter(2), batch, **options)
    np.testing.assert_array_equal(everything.stats.rounds, 40 // (k + 1))
    report(tokens=int(out.lengths.sum()), accepted=f"{out.stats.accepted.sum() / out.stats.drafted.sum():.2f}")


@pytest.mark.parametrize("unread", [1, 3])
def test_skipped_layers_read_cache_of_whole_model(report, unread):
    target, drafter = toys.tiny_llama(10, 3), jspec.EarlyExitDrafter(3, skipped=(1,))
    out = drafted(drafter, target, unread)
    errors = []

    @jax.jit
    def expected(read, rest):
        cache, start = target.new_cache(1, 16), jnp.zeros(1, jnp.int32)
        if read.size:
            _, cache = target.forward(read[None], cache, start)
        hidden, _ = target.forward(rest[None], cache, start + read.size, layers=(0, 2))
        return jax.nn.softmax(target.logits(hidden))[0, -K:]

    for row in range(5):
        text = np.array([*TOKENS[row, : LENGTHS[row]], *out.tokens[row]])
        read = max(int(LENGTHS[row]) - unread, 0)  # with all layers; the rest with layers 0 and 2
        errors.append(np.abs(expected(text[:read], text[read:-1]) - out.probs[row]).max())
    report(error=f"{max(errors):.1e}")
    assert max(errors) < 1e-5


def test_mixture_averages_distributions(report):
    tables = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    first, second = (jspec.BigramDrafter(jnp.asarray(table)) for table in tables)
    errors = []
    for temperature, weight in ((1.0, 0.3), (0.7, 0.9), (0.0, 0.5), (1.0, 0.0), (1.0, 1.0)):
        out = drafted(jspec.MixtureDrafter(first, second, weight), temperature=temperature)
        last = np.concatenate([TOKENS[np.arange(5), LENGTHS - 1][:, None], out.tokens[:, :-1]], axis=1)
        laws = np.exp(tables) / np.exp(tables).sum(-1, keepdims=True)
        mixed = weight * laws[0, last] + (1 - weight) * laws[1, last]
        sharp = mixed ** (1 / temperature) if temperature else mixed == mixed.max(-1, keepdims=True)
        errors.append(np.abs(out.probs - sharp / sharp.sum(-1, keepdims=True)).max())
    report(error=f"{max(errors):.1e}")
    assert max(errors) < 1e-6


def test_mixture_with_silent_drafter_equals_other_drafter():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    known, silent = jspec.BigramDrafter(table), jspec.BigramDrafter(jnp.full((8, 8), -jnp.inf))
    expected = drafted(known)
    for first, second, weight in ((known, silent, 0.3), (silent, known, 0.3), (known, silent, 0), (silent, known, 1)):
        out = drafted(jspec.MixtureDrafter(first, second, weight))
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_allclose(out.probs, expected.probs, atol=1e-6)
    assert not drafted(jspec.MixtureDrafter(silent, silent, 0.3)).probs.any()


def test_changed_weight_does_not_recompile(toy, prompts):
    batch, sizes = prompts([3]), []
    for weight in (0.2, np.float32(0.5), 1):
        mixture = jspec.MixtureDrafter(toy(1), jspec.ModelDrafter(toy(2)), weight)
        drafters.generate(toy(0), mixture, batch, max_new_tokens=4)
        sizes.append(decode_program._cache_size())
    assert len(set(sizes)) == 1


def test_mistakes_are_reported(toy, prompts):
    exit_, lookup = jspec.EarlyExitDrafter, jspec.NGramDrafter()
    for make, error, message in (
        (lambda: exit_(0), ValueError, "num_layers must be an int of at least 1; got 0"),
        (lambda: exit_(2, (2,)), ValueError, "skipped holds 2; expected layer indices from 0 to 1"),
        (lambda: exit_(2, (0, 1)), ValueError, "skipped leaves none of the 2 layers"),
        (lambda: exit_(2, 0), ValueError, r"skipped must be layer indices, such as \(3, 5\); got 0"),
        (lambda: jspec.MixtureDrafter(toy(0), toy(1), "x"), ValueError, "weight must be one number between 0 and 1"),
        (
            lambda: jspec.MixtureDrafter(toy(0), lookup, 0.5),
            TypeError,
            "second is of type NGramDrafter, which does not",
        ),
        (
            lambda: jspec.MixtureDrafter(toy(0), toy(1), 1.5),
            ValueError,
            "weight must be one number between 0 and 1; got 1.5",
        ),
        (lambda: jspec.MixtureDrafter(toy(0), toy(1), float("nan")), ValueError, "weight must be one number"),
    ):
        with pytest.raises(error, match=message):
            make()
    for drafter, message in (
        (exit_(2), r"EarlyExitDrafter has num_layers=2, but its target, a Llama, has only 1 layers"),
        (jspec.MixtureDrafter(toy(0), toy(1, vocab_size=60), 0.5), "vocabularies of 60 and 61"),
        *(
            (jspec.MixtureDrafter(toy(0), toy(1), weight), "weight must be one number between 0")
            for weight in (None, np.ones(2), jnp.float32(1.5))
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jspec.speculative_generate(toy(0), drafter, *prompts([3]), max_new_tokens=4)
