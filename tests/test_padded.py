"""A draft model whose vocabulary is padded drafts what it would without the padding, as likely as it may find that."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.types import longer_by_padding

V, PADDED = 61, 64
DRAFTERS = {
    "model": lambda model, target: model,
    "mixture": lambda model, target: jspec.MixtureDrafter(jspec.EarlyExitDrafter(1), model, 0.5),
    "cascade": lambda model, target: jspec.CascadeDrafter(model, jspec.NGramDrafter(1, 1), 2),
    "exit of a cascade": lambda model, target: jspec.CascadeDrafter(model, jspec.EarlyExitDrafter(1), 2),
}


def padded(model, empty):
    """`empty`, a model like `model` but for its vocabulary, with the weights of `model` and high logits behind them."""
    weights = dict(nnx.to_flat_state(nnx.state(model)))
    for path, leaf in nnx.to_flat_state(nnx.state(empty)):
        own = weights[path][...]
        if leaf.shape != own.shape:  # [E, V]
            own = jnp.concatenate([own, 3 * own[:, : PADDED - V]], axis=1)
        leaf.set_value(own)
    return empty


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_behind_the_vocabulary_are_never_meant(toy, prompts, name, report):
    batch, target, draft = prompts([7, 1, 4]), toy(0), toy(0, distance=0.2)
    options = {"max_new_tokens": 24, "num_draft_tokens": 3}
    expected, out = (
        jspec.speculative_generate(target, DRAFTERS[name](model, target), *batch, **options)
        for model in (draft, padded(draft, toy(1, vocab_size=PADDED)))
    )
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.stats.accepted_at, expected.stats.accepted_at)
    report(accepted=int(out.stats.accepted.sum()), drafted=int(out.stats.drafted.sum()))
    assert out.stats.accepted.sum() > 0


def test_what_passes_for_padding():
    assert longer_by_padding(2112, 2048) and longer_by_padding(152_064, 151_936) and longer_by_padding(64, 61)
    assert not longer_by_padding(2048, 2048) and not longer_by_padding(2048, 2112)
    assert not longer_by_padding(32_768, 32_000) and not longer_by_padding(62, 61)


def test_a_longer_vocabulary_of_another_kind_is_refused(toy, prompts):
    batch, options = prompts([3]), {"max_new_tokens": 4}
    with pytest.raises(ValueError, match="draft's vocabulary has 62 tokens and the target's 61; use a draft"):
        jspec.speculative_generate(toy(0), toy(1, vocab_size=62), *batch, **options)
    pair = jspec.FallbackDrafter(toy(1), toy(1, vocab_size=62))
    with pytest.raises(ValueError, match="combines vocabularies of 61 and 62 tokens"):
        jspec.speculative_generate(toy(0), pair, *batch, **options)
