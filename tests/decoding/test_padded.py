"""Vocabularies that differ by padding: neither the draft's nor the target's padding changes what is drafted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.core.sampling import draft_transforms, target_transforms
from jspec.core.types import longer_by_padding, same_but_for_padding
from jspec.drafters import Context, ModelDrafter
from jspec.drafters.standalone import autoregressive
from support import oracle, toys

V, PADDED = 61, 64
DRAFTERS = {
    "model": lambda model, target: model,
    "mixture": lambda model, target: jspec.MixtureDrafter(jspec.EarlyExitDrafter(1), model, 0.5),
    "cascade": lambda model, target: jspec.CascadeDrafter(model, jspec.NGramDrafter(1, 1), 2),
    "exit of a cascade": lambda model, target: jspec.CascadeDrafter(model, jspec.EarlyExitDrafter(1), 2),
}


def padded(model, empty, scale=3):
    """Return `empty`, like `model` except for its vocabulary, with `model`'s weights and high logits after them."""
    weights = dict(nnx.to_flat_state(nnx.state(model)))
    for path, leaf in nnx.to_flat_state(nnx.state(empty)):
        own = weights[path][...]
        if leaf.shape != own.shape:  # [E, V]
            own = jnp.concatenate([own, scale * own[:, : PADDED - V]], axis=1)
        leaf.set_value(own)
    return empty


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", DRAFTERS)
def test_draft_padding_rows_do_not_change_output(toy, prompts, name, report):
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


BEHIND = {
    "mixture": lambda model: jspec.MixtureDrafter(jspec.UnigramDrafter(jnp.linspace(0, 3, V)), model, 0.5),
    "cascade": lambda model: jspec.CascadeDrafter(model, jspec.NGramDrafter(1, 1), 2),
}


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", ["mixture", pytest.param("cascade", marks=pytest.mark.slow)])
def test_target_padding_rows_are_never_drafted(toy, prompts, name, report):
    """A target whose padding is forbidden by a bias equals the target without padding."""
    batch, target, draft = prompts([7, 1, 4]), toy(0), BEHIND[name](toy(0, distance=0.2))
    forbidden = jspec.SamplingParams(logit_bias=np.where(np.arange(PADDED) < V, 0, -np.inf))
    options = {"max_new_tokens": 24, "num_draft_tokens": 3}
    expected = jspec.speculative_generate(target, draft, *batch, **options)
    longer = padded(target, toy(1, vocab_size=PADDED))
    out = jspec.speculative_generate(longer, draft, *batch, **options, sampling=forbidden)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_array_equal(out.stats.accepted_at, expected.stats.accepted_at)
    report(accepted=int(out.stats.accepted.sum()), drafted=int(out.stats.drafted.sum()))
    assert out.stats.accepted.sum() > 0


@pytest.mark.usefixtures("quick_compile")
def test_greedy_text_with_padded_target_equals_plain(toy, prompts, report):
    """The target emits padding, which its draft reads as other tokens; a mixture's distributions are shorter."""
    batch, target = prompts([7, 1, 4]), padded(toy(0), toy(1, vocab_size=PADDED), scale=1.2)
    options = {"max_new_tokens": 24, "sampling": jspec.SamplingParams(temperature=0)}
    plain = jspec.generate(target, *batch, **options)
    draft = jspec.MixtureDrafter(jspec.EarlyExitDrafter(1), toy(0, distance=0.2), 0.3)
    out = jspec.speculative_generate(target, draft, *batch, **options, num_draft_tokens=3)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    behind = np.asarray(out.tokens) >= V
    report(behind=behind.sum(), of=behind.size, accepted=int(out.stats.accepted.sum()))
    assert 0 < behind.sum() < behind.size and out.stats.accepted.sum() > 0


IDS = np.array([3, 10, 40, 60, 61, 63])  # what the tables below can emit; the last two only the target's


def p_of_two_tokens(draws=10_000):
    """Return the chi-square p-value of two tokens, the second drafted after the first, and the accepted count."""
    rng = np.random.default_rng(6)
    tables = [np.full((size, size), -np.inf, np.float32) for size in (PADDED, V)]
    for table, known in zip(tables, (IDS, IDS[:4]), strict=True):
        table[:, known] = rng.normal(size=(len(table), len(known)))
    target, draft = (toys.MarkovModel(jnp.asarray(table)) for table in tables)
    keys, tokens = jax.random.split(jax.random.key(4), draws), jnp.full((draws, 1), IDS[0])
    plain = jspec.SamplingParams()
    transforms = target_transforms(plain), draft_transforms(plain)
    batch = tokens, jnp.ones(draws, jnp.int32), keys, transforms
    out = toys.decode(target, ModelDrafter(draft), *batch, max_new_tokens=2, num_draft_tokens=2)
    laws = oracle.softmax(tables[0].astype(np.float64))
    joint = laws[IDS[0]][:, None] * laws
    observed = np.bincount(np.asarray(out.tokens) @ [PADDED, 1], minlength=PADDED**2)
    return oracle.p_value(observed, joint.ravel()), int(out.stats.accepted.sum())


def test_distribution_with_padded_target_is_exact(report, monkeypatch, quick_compile):
    p, accepted = p_of_two_tokens()
    report(draws=10_000, p=f"{p:.2g}", accepted=accepted, sees_tv=f"{oracle.detectable(10_000, len(IDS) ** 2 - 1):.3f}")
    assert p > oracle.ALPHA and accepted > 0
    # Planted bug: the declared distribution gives padding mass, and drawn padding is clamped to the vocabulary.
    draw = Context.draw
    monkeypatch.setattr(Context, "draw", lambda self, k, probs: jnp.minimum(draw(self, k, probs), V - 1))
    monkeypatch.setattr(
        autoregressive,
        "fit_vocabulary",
        lambda logits, size: jnp.pad(logits, ((0, 0), (0, size - V)), constant_values=1),
    )
    assert p_of_two_tokens()[0] < oracle.ALPHA


def test_vocabulary_padding_is_recognised():
    assert same_but_for_padding(152_064, 151_936) and same_but_for_padding(151_936, 152_064)
    assert same_but_for_padding(61, 61) and not same_but_for_padding(61, 62) and not same_but_for_padding(62, 61)
    assert longer_by_padding(2112, 2048) and longer_by_padding(152_064, 151_936) and longer_by_padding(64, 61)
    assert not longer_by_padding(2048, 2048) and not longer_by_padding(2048, 2112)
    assert not longer_by_padding(32_768, 32_000) and not longer_by_padding(62, 61)


def test_mismatched_longer_vocabulary_is_rejected(toy, prompts):
    batch, options = prompts([3]), {"max_new_tokens": 4}
    with pytest.raises(ValueError, match="draft's vocabulary has 62 tokens and the target's 61; use a draft"):
        jspec.speculative_generate(toy(0), toy(1, vocab_size=62), *batch, **options)
    with pytest.raises(ValueError, match="draft's vocabulary has 61 tokens and the target's 62; use a draft"):
        jspec.speculative_generate(toy(0, vocab_size=62), toy(1), *batch, **options)
    pair = jspec.FallbackDrafter(toy(1), toy(1, vocab_size=62))
    with pytest.raises(ValueError, match="combines vocabularies of 61 and 62 tokens"):
        jspec.speculative_generate(toy(0), pair, *batch, **options)
