"""Log-probabilities of tokens, and the native kernel that normalises logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspec.models.kernels.cpu.log_sum_exp import log_sum_exp
from jspec.models.logprobs import raw_logprobs, top_logprobs
from support.packed_matrices import needs_attention as needs_kernel

SIZES = 1, 15, 16, 17, 2047, 2048, 2049, 49152


def random_logits(*shape):
    return 5 * np.random.default_rng(0).standard_normal(shape, np.float32)


def exact(logits):
    """Return the log-softmax in float64."""
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def is_native(function, *arguments):
    return "custom_call" in jax.jit(function).lower(*arguments).as_text()


@pytest.mark.parametrize("size", SIZES)
def test_log_probabilities_are_exact(size, report):
    logits = random_logits(2, 3, size)
    tokens = np.random.default_rng(1).integers(0, size, (2, 3))
    found = jax.jit(raw_logprobs)(logits, tokens)
    expected = np.take_along_axis(exact(logits), tokens[..., None], 2)[..., 0]
    report(size=size, error=f"{np.abs(found - expected).max():.1e}")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_top_log_probabilities_are_in_order():
    logits = random_logits(2, 3, 300)
    ids, tops = jax.jit(top_logprobs, static_argnums=1)(logits, 5)
    expected = np.argsort(-logits, axis=-1)[..., :5]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(tops, np.take_along_axis(exact(logits), expected, 2), atol=1e-5)


def test_logits_in_half_precision_are_normalised_in_float32():
    logits = jnp.asarray(random_logits(1, 2, 3000), jnp.bfloat16)
    tokens = np.array([[5, 2999]])
    found = jax.jit(raw_logprobs)(logits, tokens)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jax.jit(raw_logprobs)(logits.astype(jnp.float32), tokens))


@needs_kernel
@pytest.mark.parametrize("size", [300, 49152, 151936])
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(size):
    """Test workers have one thread each, but ``-n 0`` uses all cores."""
    logits = random_logits(30, size)
    assert is_native(raw_logprobs, logits[None], np.zeros((1, 30), int))
    whole = jax.jit(log_sum_exp)(logits)
    for count in (1, 3, 10):
        parts = [jax.jit(log_sum_exp)(part) for part in logits.reshape(-1, count, size)]
        for found, expected in zip(zip(*parts, strict=True), whole, strict=True):
            assert np.concatenate(found).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("bad", [[np.nan, 1, 2], [-np.inf] * 3, [np.inf, 0, 1], [0] * 5000 + [np.nan]], ids=str)
def test_invalid_logits_give_nan(bad):
    found = jax.jit(raw_logprobs)(np.array([[bad, [0] * len(bad)]], np.float32), np.zeros((1, 2), int))
    assert np.isnan(found[0, 0])
    np.testing.assert_allclose(found[0, 1], -np.log(len(bad)), rtol=1e-6)


def test_impossible_tokens_do_not_count():
    """Whole pieces of the vocabulary are -inf."""
    logits = np.full((1, 1, 9000), -np.inf, np.float32)
    logits[..., [3, 8999]] = 1, 2
    found = jax.jit(raw_logprobs)(logits, np.array([[3]])), jax.jit(raw_logprobs)(logits, np.array([[4000]]))
    np.testing.assert_allclose(found[0], -np.log(1 + np.e), rtol=1e-6)
    assert found[1] == -np.inf


@needs_kernel
def test_derivatives_and_exports_use_xla_but_shard_map_uses_the_kernel():
    logits, tokens = random_logits(2, 3, 400), np.zeros((2, 3), int)
    gradient = jax.jit(jax.grad(lambda logits: raw_logprobs(logits, tokens).sum()))(logits)
    np.testing.assert_allclose(gradient, np.eye(400)[tokens] - np.exp(exact(logits)), atol=1e-6)
    exported = jax.export.export(jax.jit(raw_logprobs))(logits, tokens)
    assert "custom_call" not in exported.mlir_module()
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(raw_logprobs, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    assert is_native(sharded, logits, tokens)
    np.testing.assert_array_equal(jax.jit(sharded)(logits, tokens), jax.jit(raw_logprobs)(logits, tokens))
