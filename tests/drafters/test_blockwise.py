"""Blockwise parallel decoding: its layer matches PyTorch, and a round takes one pass of the target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from support import heads, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)
E, V = TARGET.config.hidden_size, TARGET.config.vocab_size


def test_logits_match_torch():
    torch = pytest.importorskip("torch")
    """As in Tensor2Tensor's TransformerBlockParallel: two dense layers, outputs per block, residual, output head."""
    drafter, x = heads.blockwise(TARGET), np.random.default_rng(1).normal(size=(4, 5, E)).astype(np.float32)
    up = heads.loaded(torch.nn.Linear(E, drafter.layer.up.bias[...].size), drafter.layer.up)
    down = heads.loaded(torch.nn.Linear(drafter.layer.up.bias[...].size, 3 * E), drafter.layer.down)
    states = torch.tensor(x)[:, :, None] + down(torch.relu(up(torch.tensor(x)))).reshape(4, 5, 3, E)
    expected = states.detach().numpy() @ np.array(TARGET.lm_head.weight[...])
    np.testing.assert_allclose(drafter.logits(jnp.asarray(x), TARGET, 3), expected, atol=2e-5)
    np.testing.assert_allclose(drafter.logits(jnp.asarray(x), TARGET, 2), expected[:, :, :2], atol=2e-5)


def circling():
    """Return a cyclic target, and a drafter that knows it by moving one-hot states on by i + 2 steps."""
    target, drafter, layer = heads.markov_llama(heads.CIRCLE), heads.blockwise(TARGET), heads.blockwise(TARGET).layer
    step = np.pad(heads.CIRCLE / heads.CIRCLE.max(), (0, E - V))
    moved = [np.linalg.matrix_power(step, i + 1) - np.eye(E) for i in range(3)]
    layer.up.weight.set_value(jnp.eye(E, layer.up.bias[...].size))
    layer.down.weight.set_value(
        jnp.pad(jnp.asarray(np.concatenate(moved, 1)), ((0, layer.up.bias[...].size - E), (0, 0)))
    )
    for linear in (layer.up, layer.down):
        linear.weight.set_value(linear.weight[...].astype(jnp.float32))
        linear.bias.set_value(jnp.zeros_like(linear.bias[...]))
    return target, dataclasses.replace(drafter, layer=layer)


def test_exact_layer_is_always_accepted_with_one_pass_per_round():
    """Prediction costs no pass beyond verification, as in the combined scheme of section 4 of the paper."""
    target, drafter = circling()
    passes = heads.counted(target)
    heads.check_always_right(target, drafter, temperature=0)
    jax.effects_barrier()
    assert passes == [4] + 6 * [3 + 1]  # the prompt, and 24 tokens, 4 at a time


def test_half_precision_and_int8_targets_give_float32_logits():
    """The drafter's states reach the target's head in the target's dtype."""
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TARGET)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 1, E)), jnp.bfloat16)
    expected = heads.blockwise(TARGET).logits(x, TARGET, 2)
    for target in (half, jspec.quantize(half)):
        found = heads.blockwise(TARGET).logits(x, target, 2)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, atol=0.2)
