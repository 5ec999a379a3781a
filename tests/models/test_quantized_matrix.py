"""Products with int8 and int4 codes: each platform's implementation matches a float64 product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.models import quantized_matrix
from jspec.models.quantized_matrix import QuantizedMatrix, group_size

pytestmark = pytest.mark.usefixtures("quick_compile")
FORMS = {"cpu": quantized_matrix._on_cpu, "cuda": quantized_matrix._on_cuda, "tpu": quantized_matrix._by_groups}
SIZES = {"int8": (1, 384), "int4": (3, 128)}  # groups and inputs per group


def _matrix(kind, outputs=40):
    """Return a random matrix and its weights ``float64[out, in]``."""
    rng, (groups, size) = np.random.default_rng(0), SIZES[kind]
    largest = 127 if kind == "int8" else 7
    codes = rng.integers(-largest - (kind == "int4"), largest + 1, (groups, outputs, size))
    scales = rng.uniform(-0.02, 0.02, (groups, outputs)).astype(np.float32)
    weights = (codes * scales[..., None].astype(np.float64)).swapaxes(0, 1).reshape(outputs, -1)
    return QuantizedMatrix(jnp.asarray(codes, kind), jnp.asarray(scales)), weights


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 32, 33, 63, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("platform", FORMS)
def test_product_equals_float64_product(platform, kind, dtype, rows):
    """The row counts lie on both sides of every threshold between implementations."""
    matrix, weights = _matrix(kind)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, weights.shape[1])), dtype)
    found = FORMS[platform](x, matrix.codes[...], matrix.scales[...])
    expected = np.asarray(x, np.float64) @ weights.T
    assert (found.dtype, found.shape) == (np.float32, expected.shape)
    # With many rows, matrices of several groups are widened to the dtype of x.
    widens = kind == "int4" and 2 * rows >= 128 and platform != "cpu" and dtype != "float32"
    rounding = {"bfloat16": 2e-2, "float16": 3e-3}[dtype] if widens else 5e-5
    np.testing.assert_allclose(found, expected, atol=rounding, rtol=1e-5)


@pytest.mark.parametrize("kind", SIZES)
def test_multiply_supports_batches_vmap_and_gradients(kind):
    matrix, weights = _matrix(kind)
    x = np.random.default_rng(2).standard_normal((2, 3, weights.shape[1])).astype(np.float32)
    for found in (matrix.multiply(x), jax.vmap(matrix.multiply)(x)):
        np.testing.assert_allclose(found, x @ weights.T, atol=3e-4)
    gradient = jax.grad(lambda x: (matrix.multiply(x) ** 2).sum())(jnp.asarray(x))
    np.testing.assert_allclose(gradient, 2 * (x @ weights.T) @ weights, atol=1e-2)


@pytest.mark.parametrize("kind", SIZES)
def test_rows_are_taken_clipped_and_selected(kind):
    matrix, weights = _matrix(kind)
    np.testing.assert_allclose(matrix.widen(), weights, rtol=1e-6)
    rows = np.array([[3, 0, 39], [39, 40, -1]])
    taken = matrix.take(rows)
    assert taken.shape == (2, 3, weights.shape[1])
    np.testing.assert_array_equal(taken, np.asarray(matrix.widen())[rows.clip(0, 39)])
    few = matrix.select([7, 2])
    assert few.out_size == 2 and few.format == kind
    np.testing.assert_array_equal(few.widen(), matrix.widen()[jnp.array([7, 2])])


@pytest.mark.parametrize("rows", [[5], [0, 39, 4]])
@pytest.mark.parametrize("kind", SIZES)
def test_tpu_gather_matches_select(kind, rows):
    matrix, _ = _matrix(kind)
    found = quantized_matrix._taken_on_tpu(matrix.codes[...], jnp.array(rows))
    np.testing.assert_array_equal(found, matrix.select(rows).codes[...])


def test_group_size_is_the_largest_that_divides_the_inputs():
    assert [group_size(inputs, "int4") for inputs in (4096, 896, 576, 96, 48)] == [128, 128, 64, 32, 48]
    assert group_size(4096, "int8") == 4096


def test_tensor_parallel_divides_codes_like_weights():
    place = jspec.tensor_parallel(jax.sharding.AbstractMesh((2,), ("model",)), "model")
    for owner, spec in (("down_proj", ("model", None, None)), ("qkv_proj", (None, "model", None))):
        name = f"layers.0.mlp.{owner}.parts.0"
        assert tuple(place(f"{name}.codes", (4, 64, 128)).spec) == spec
        assert tuple(place(f"{name}.scales", (4, 64)).spec) == spec[:2]
    one = "layers.0.mlp.down_proj.parts.0"
    assert tuple(place(f"{one}.codes", (1, 64, 512)).spec) == (None, None, "model")
    assert tuple(place(f"{one}.scales", (1, 64)).spec) == (None, None)
