"""Packed matrices: stored weights, and products compared with float64 and XLA."""

import ctypes
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert import blocks
from jspec.models import packed
from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.product import ProductKernel
from jspec.models.packed import PackedMatrix
from support.packed_matrices import FORMATS, matrix, needs_compiler, rounded

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [16, 39])
def test_weights_equal_those_of_the_gguf_library(name, count):
    one, weights = matrix(name, count, 512)
    np.testing.assert_array_equal(one.widen(), weights)
    np.testing.assert_array_equal(jax.jit(PackedMatrix.widen)(one), weights)
    rows = np.array([[0, count - 1], [count, 7]])
    np.testing.assert_array_equal(one.take(rows), weights[np.minimum(rows, count - 1)])
    chosen = [3, 3, 11, 0, 15, *range(1, 15)]
    np.testing.assert_array_equal(one.select(chosen).widen(), weights[chosen])


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
def test_native_kernel_is_as_accurate_as_float32(name, report):
    one, weights = matrix(name, 100, 1024)
    x = np.random.default_rng(1).standard_normal((9, 1024)).astype(np.float32)
    x[0] *= np.exp(np.random.default_rng(2).uniform(-20, 2, 1024))  # values of very different sizes in one run
    x[1], x[2] = 0, 1e-28
    expected = x.astype(np.float64) @ weights.T.astype(np.float64)
    multiply = jax.jit(PackedMatrix.multiply)
    assert "jspec_product" in multiply.lower(one, x).as_text()
    found = np.asarray(multiply(one, x), np.float64)
    (other,) = jax.jit(packed.multiply_widened, static_argnums=(2, 3))(x, one.tiles[...], one.kernel, 100)
    scale = np.abs(x).astype(np.float64) @ np.abs(weights).T + 1e-30
    errors = [np.sqrt(np.mean(np.square((result - expected) / scale)[3:])) for result in (found, np.asarray(other))]
    report(native=f"{errors[0]:.1e}", xla=f"{errors[1]:.1e}")
    assert errors[0] <= errors[1]
    assert (np.abs(found - expected) <= 1e-6 * scale).all()


@needs_compiler
def test_activations_are_rounded_in_proportion_to_the_largest_of_32(report):
    one, weights = matrix("Q8_0", 16, 32)
    x = np.random.default_rng(1).uniform(-1, 1, (64, 32)).astype(np.float32)
    x[:, 0] = np.exp2(np.arange(64) / 4)  # from 1 to 55,000
    # The large activation contributes the same to both products, so that only the rounding of the others is seen.
    only = np.zeros_like(x)
    only[:, 0] = x[:, 0]
    found = np.asarray(one.multiply(x), np.float64) - np.asarray(one.multiply(only), np.float64)
    expected = x[:, 1:].astype(np.float64) @ weights[:, 1:].T.astype(np.float64)
    bound = 2**-22 * x[:, :1] * np.abs(weights).sum(axis=1, dtype=np.float64)
    report(largest_error_over_bound=round(float((np.abs(found - expected) / bound).max()), 2))
    assert (np.abs(found - expected) <= bound).all()


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("native_kernel", [True, False], ids=["native", "XLA"])
def test_activations_are_rounded_to_fewer_bits_on_request(name, bits, native_kernel):
    one, weights = matrix(name, 100, 512, bits)
    x = np.random.default_rng(1).standard_normal((9, 512)).astype(np.float32)
    x[1], x[2, 7] = 0, 1e4
    activations = x if name in ("BF16", "F16") else rounded(x, bits)
    expected = activations.astype(np.float64) @ weights.T.astype(np.float64)
    found = one.multiply(x) if native_kernel else packed.multiply_widened(x, one.tiles[...], one.kernel, 100)[0]
    scale = np.abs(x).astype(np.float64) @ np.abs(weights).T + 1e-30
    # The largest step is 1e4 / 127. A value halfway between two integers may be rounded either way.
    assert (np.abs(found - expected) <= 1e-6 * scale).mean() > 0.99
    np.testing.assert_allclose(found, expected, rtol=0, atol=1.01 * 1e4 / {8: 127, 16: 127 * 257}[bits])


@needs_compiler
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bits", [8, 16, 24])
def test_bits_of_a_row_do_not_depend_on_other_rows(name, bits):
    one, _ = matrix(name, 100, 512, bits)
    x = np.random.default_rng(1).standard_normal((19, 512)).astype(np.float32)
    multiply = jax.jit(PackedMatrix.multiply)
    whole = np.asarray(multiply(one, x))
    for count in range(1, 14):
        for start in (0, 5):
            part = np.asarray(multiply(one, x[start : start + count]))
            assert part.tobytes() == whole[start : start + count].tobytes()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instruction sets are for x86-64")
@pytest.mark.parametrize(
    ("processor", "name", "bits"),
    [
        ("haswell", "Q6_K", 24),
        ("haswell", "Q4_K", 8),
        ("haswell", "F16", 24),
        ("x86-64", "Q4_K", 24),
        ("x86-64", "Q8_0", 16),
    ],
)
def test_other_instruction_sets_give_the_same_product(monkeypatch, tmp_path, name, processor, bits):
    flags = [f"-march={processor}" if flag.startswith("-march") else flag for flag in native._FLAGS]
    monkeypatch.setattr(native, "_FLAGS", tuple(flags))
    native._compile(native._compiler(), ProductKernel(name, bits), tmp_path / "product.so")
    loaded = jax.ffi.pycapsule(ctypes.CDLL(str(tmp_path / "product.so")).product)
    target = f"test_product_{name}_{processor}_{bits}"
    jax.ffi.register_ffi_target(target, loaded, platform="cpu")
    one, weights = matrix(name, 40, 512, bits)
    x = np.random.default_rng(1).standard_normal((7, 512)).astype(np.float32)
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((7, 40), jnp.float32))
    found, expected = np.asarray(jax.jit(call)(x, one.tiles[...])), np.asarray(one.multiply(x))
    # Without fused operations, sums of groups are rounded once more.
    bound = 0 if processor == "haswell" else 5e-7 * np.abs(x) @ np.abs(weights).T
    assert (np.abs(found - expected) <= bound).all()


def exact_rounding(x, bits):
    """Return ``x float32[N, 32]`` rounded as `jspec.models.packed` describes, computed in NumPy."""
    largest_integer = 0x7F7F7F >> (24 - bits)
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(2.0**-97))
    if bits < 24:
        step, inverse = largest / np.float32(largest_integer), np.float32(largest_integer) / largest
    else:
        exponent = np.frexp(largest)[1] - 1
        exponent += largest * np.exp2(22.0 - exponent) > largest_integer
        step, inverse = (np.exp2(sign * (exponent - 22.0)).astype(np.float32) for sign in (1, -1))
    with np.errstate(over="ignore"):  # the largest float32 rounds to infinity
        return step * np.rint(x * inverse)


@needs_compiler
@pytest.mark.parametrize("bits", [8, 16, 24])
def test_activations_are_rounded_to_nearest_even_integers(bits):
    """An identity matrix returns the rounded activations."""
    stored = np.zeros((32, 34), np.uint8)
    stored[:, :2] = np.float16(1)[None].view(np.uint8)
    stored[np.arange(32), 2 + np.arange(32)] = 1
    tiles = blocks.empty_tiles(2, 16 * 34)
    blocks.interleave("Q8_0", stored, tiles)
    one = PackedMatrix(jax.device_put(tiles), "Q8_0", (32, 32), bits)
    assert native.register(one.kernel)
    halves = np.arange(-16, 16, dtype=np.float32) + np.float32(0.5)
    largest = [127, 32639, 0x7F7F7F, 2.0**-97, 2.0**-98, 1e-45, 1.99 * 2.0**7, 1.999 * 2.0**7, 3.4e38, 0]
    rows = [np.append(halves[:-1], np.float32(value)) for value in largest]
    tiny = [np.linspace(-value, value, 32, dtype=np.float32) for value in (2.0**-97, 1e-40, 3.4028235e38, -0.0)]
    many = np.random.default_rng(1).standard_normal((200, 32)) * np.exp2(np.arange(-100, 100))[:, None]
    x = np.stack([*rows, *tiny, *many.astype(np.float32)])
    found = np.asarray(jax.jit(PackedMatrix.multiply)(one, x))
    np.testing.assert_array_equal(found, exact_rounding(x, bits))


@pytest.mark.parametrize(("count", "alignment"), [(1, 64), (300, 2 << 20)])
def test_jax_uses_tiles_without_a_copy(count, alignment):
    tiles = blocks.empty_tiles(count, 16 * 1024)
    assert tiles.shape == (count, 16 * 1024) and tiles.ctypes.data % alignment == 0
    assert jax.device_put(tiles).unsafe_buffer_pointer() == tiles.ctypes.data


@needs_compiler
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "BF16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_row_does_not_change_other_rows(name, bad):
    one, _ = matrix(name, 20, 256)
    x = np.ones((3, 256), np.float32)
    clean = np.asarray(one.multiply(x))
    x[1, 77] = bad
    found = np.asarray(jax.jit(PackedMatrix.multiply)(one, x))
    assert not np.isfinite(found[1]).any()
    assert found[[0, 2]].tobytes() == clean[[0, 2]].tobytes()


@pytest.mark.parametrize("name", ["Q5_0", "Q6_K", "F16"])
def test_transformations_use_the_widened_matrix(name):
    one, weights = matrix(name, 20, 256)
    x = np.random.default_rng(1).standard_normal((2, 3, 256)).astype(np.float32)
    expected = x @ weights.T
    np.testing.assert_allclose(one.multiply(x), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.vmap(one.multiply)(x), expected, rtol=1e-4, atol=1e-4)
    gradient = jax.grad(lambda x: jnp.square(one.multiply(x)).sum())(x)
    np.testing.assert_allclose(gradient, 2 * expected @ weights, rtol=1e-4, atol=1e-6 * np.abs(gradient).max())


@pytest.mark.parametrize("name", FORMATS)
def test_strict_promotion_of_ranks_and_dtypes_is_supported(name):
    one, weights = matrix(name, 20, 256)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        np.testing.assert_array_equal(one.widen(), weights)
        np.testing.assert_array_equal(one.take(np.array([3])), weights[[3]])
        assert one.multiply(jnp.ones((2, 256))).shape == (2, 20)


@needs_compiler
def test_vmap_uses_the_kernel():
    one, _ = matrix("Q4_K", 20, 256)
    x = np.random.default_rng(1).standard_normal((4, 3, 256)).astype(np.float32)
    mapped = jax.jit(jax.vmap(one.multiply, in_axes=1, out_axes=1))
    assert "jspec_product" in mapped.lower(x).as_text()
    np.testing.assert_array_equal(mapped(x), one.multiply(x))


def test_rows_are_selected_by_ids_of_any_integer_type():
    one, weights = matrix("Q8_0", 400, 32)
    rows = np.arange(0, 240, 12, dtype=np.uint8)  # 20 rows of 25 tiles
    np.testing.assert_array_equal(one.select(rows).widen(), weights[rows])
    np.testing.assert_array_equal(one.take(rows), weights[rows])


def test_gradient_ignores_the_rounding_of_activations():
    one, weights = matrix("Q4_0", 20, 256, 8)
    x = np.random.default_rng(1).standard_normal((1, 256)).astype(np.float32)
    np.testing.assert_allclose(
        jax.grad(lambda x: one.multiply(x).sum())(x)[0], weights.sum(axis=0), rtol=1e-4, atol=1e-5
    )
