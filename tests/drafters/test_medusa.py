"""Medusa heads: they compute what PyTorch does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import heads, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)
E, V = TARGET.config.hidden_size, TARGET.config.vocab_size


@pytest.mark.parametrize("blocks", [1, 2])
def test_logits_match_torch(blocks):
    pytest.importorskip("torch")
    from support import heads_torch as published

    drafter, x = heads.medusa(TARGET, 3, blocks), np.random.default_rng(1).normal(size=(4, 5, E)).astype(np.float32)
    found = drafter.logits(jnp.asarray(x), TARGET, 3)
    for i, ours in enumerate(drafter.heads):
        np.testing.assert_allclose(found[:, :, i], published.medusa(ours, x), atol=1e-5)


def test_exact_heads_are_always_accepted():
    """The target is cyclic, and head i takes i + 2 of its steps at once."""
    target, drafter = heads.markov_llama(heads.CIRCLE), heads.medusa(TARGET)
    for i, head in enumerate(drafter.heads):
        steps = np.linalg.matrix_power(heads.CIRCLE / heads.CIRCLE.max(), i + 2) * heads.CIRCLE.max()
        head.lm_head.weight.set_value(heads.output_head(steps, E))
        head.blocks[0].linear.weight.set_value(jnp.zeros((E, E)))
        head.blocks[0].linear.bias.set_value(jnp.zeros(E))
    heads.check_always_right(target, drafter, temperature=0)


def test_half_precision_heads_give_float32_logits():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), heads.medusa(TARGET))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 1, E)), jnp.float32)
    found, expected = half.logits(x, TARGET, 2), heads.medusa(TARGET).logits(x, TARGET, 2)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=0.1)
