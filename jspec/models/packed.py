"""Products with packed matrices, whose weights stay in the form in which a file stores them (`convert.blocks`).

Decoding reads all weights at every pass, so their size in bytes determines its cost. If a native kernel is available
(`jspec.models.kernels.cpu`), it reads a packed matrix as it is stored, and widens each weight in a register.
Otherwise, XLA widens the whole matrix first.

Both ways use the weights of the file. The kernel rounds 32 activations at a time to integers of 24 bits, so that the
error of each is at most 2^-22 of the largest of the 32. For activations of similar size, the product is more accurate
than a float32 product. XLA's product, in contrast, keeps a small activation's own precision beside a large one.

On request, both ways round activations to integers of 16 or 8 bits, which the kernel multiplies faster. The error of
each is then at most half the largest of the 32, divided by 32,639 or 127. 16-bit formats always multiply in float32.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import ArrayLike

from convert.blocks import FORMATS, LANES
from jspec.models.kernels import dispatch
from jspec.models.kernels.cpu.product import ProductKernel

ACTIVATION_BITS = (8, 16, 24)
_RUN = 32  # activations that share a step
FLOAT_FORMATS = ("BF16", "F16")


class PackedMatrix(nnx.Module):
    """A matrix of the shape ``[out, in]``, stored in tiles of 16 outputs.

    Attributes:
        tiles: ``uint8[ceil(out / 16), bytes]``, as in `convert.blocks.StoredMatrix`.
        format: a key of `convert.blocks.FORMATS`.
        out_size: the number of outputs.
        in_size: the number of inputs.
        activation_bits: the size of the integers to which activations are rounded, one of `ACTIVATION_BITS`.
    """

    def __init__(self, tiles: Array, format: str, shape: tuple[int, int], activation_bits: int = 24):
        self.tiles = nnx.Param(tiles)
        self.format = format
        self.out_size, self.in_size = shape
        self.activation_bits = 24 if format in FLOAT_FORMATS else activation_bits

    @property
    def kernel(self) -> ProductKernel:
        """The native kernel for this matrix."""
        return ProductKernel(self.format, self.activation_bits)

    def multiply(self, x: Array) -> Array:
        """Return the product ``float32[..., out]`` for ``x[..., in]``, which is widened to float32."""
        rows = x.reshape(-1, self.in_size).astype(jnp.float32)
        product = cast(Array, _product(rows, self.tiles[...], self.kernel, self.out_size))
        return product.reshape(*x.shape[:-1], self.out_size)

    def widen(self) -> Array:
        """Return the matrix as ``float32[out, in]``."""
        return _widened(self.tiles[...], self.format)[: self.out_size]

    def take(self, rows: ArrayLike) -> Array:
        """Return the weights ``float32[..., in]`` of the outputs ``rows[...]``. Indices are clipped to valid ones."""
        rows = jnp.clip(jnp.asarray(rows, jnp.int32), 0, self.out_size - 1)
        return _decode(self.format, self._stored(rows.reshape(-1))).reshape(*rows.shape, self.in_size)

    def select(self, rows: ArrayLike) -> "PackedMatrix":
        """Return a packed matrix that holds only the outputs ``rows[D]``, with unchanged values."""
        rows = jnp.asarray(rows, jnp.int32)
        fields = self._stored(jnp.pad(rows, (0, -rows.size % LANES)))
        shape = (rows.size, self.in_size)
        return PackedMatrix(tiled(fields, self.format), self.format, shape, self.activation_bits)

    def _stored(self, rows: Array) -> dict[str, Array]:
        """Return the fields ``uint8[D, blocks, nbytes]`` of the outputs ``rows[D]``."""
        tiles = self.tiles[...]
        if rows.size < tiles.shape[0]:  # leave out all other tiles
            tiles = jnp.take(tiles, rows // LANES, axis=0)
            rows = jnp.arange(rows.size, dtype=rows.dtype) * LANES + rows % LANES
        return {
            name: jnp.take(field.reshape(-1, *field.shape[2:]), rows, axis=0)
            for name, field in _fields(tiles, self.format).items()
        }


@functools.partial(jax.jit, static_argnums=(2, 3))
def _product(x: Array, tiles: Array, kernel: ProductKernel, out_size: int) -> Array:
    """Multiply as `multiply_widened` does. The compilation makes native kernels usable outside `jax.jit`, too."""
    return dispatch.packed_product(multiply_widened, x, tiles, kernel, out_size)


def multiply_widened(x: Array, tiles: Array, kernel: ProductKernel, out_size: int) -> tuple[Array]:
    """Return the product ``float32[M, out]`` of ``x[M, in]`` and a packed matrix, which is widened first."""
    weight = _widened(tiles, kernel.format)[:out_size]
    if kernel.activation_bits < 24:
        x = _rounded(x, kernel.activation_bits)
    return (jnp.einsum("mi,oi->mo", x, weight, precision=lax.Precision.HIGHEST),)


def _rounded(x: Array, bits: int) -> Array:
    """Round each run of 32 activations to multiples of a shared step, as the native kernel does.

    The gradient is that of the identity function, because the gradient of rounding is zero.
    """
    runs = x.reshape(x.shape[0], -1, _RUN)
    largest_integer = 0x7F7F7F >> (24 - bits)
    largest = jnp.maximum(jnp.abs(runs).max(axis=-1, keepdims=True), 2.0**-97)
    rounded = jnp.round(runs * (largest_integer / largest)) * (largest / largest_integer)
    return x + lax.stop_gradient(rounded.reshape(x.shape) - x)


def _widened(tiles: Array, format: str) -> Array:
    """Return the weights in `tiles` as ``float32[16 T, in]``."""
    return _decode(format, _fields(tiles, format)).reshape(tiles.shape[0] * LANES, -1)


def _fields(tiles: Array, format: str) -> dict[str, Array]:
    """Return each field of the blocks in `tiles` as ``uint8[T, 16, blocks, nbytes]``."""
    form, count = FORMATS[format], tiles.shape[0]
    blocks = tiles.reshape(count, -1, form.nbytes * LANES)
    fields: dict[str, Array] = {}
    at = 0
    for field in form.fields:
        part = blocks[..., at : at + field.nbytes * LANES]
        part = part.reshape(count, -1, field.nbytes // field.unit, LANES, field.unit)
        fields[field.name] = jnp.moveaxis(part, 3, 1).reshape(count, LANES, -1, field.nbytes)
        at += field.nbytes * LANES
    return fields


def tiled(fields: dict[str, Array], format: str) -> Array:
    """Return the tiles of rows whose fields are ``uint8[16 T, blocks, nbytes]``, the inverse of `_fields`."""
    parts: list[Array] = []
    for field in FORMATS[format].fields:
        part = fields[field.name]
        part = part.reshape(-1, LANES, part.shape[1], field.nbytes // field.unit, field.unit)
        parts.append(jnp.moveaxis(part, 1, 3).reshape(part.shape[0], part.shape[2], -1))
    return jnp.concatenate(parts, axis=-1).reshape(parts[0].shape[0], -1)


def _decode(format: str, fields: dict[str, Array]) -> Array:
    """Return the values ``float32[..., blocks, values]`` of fields ``uint8[..., blocks, nbytes]``."""
    if format in FLOAT_FORMATS:
        kind = jnp.bfloat16 if format == "BF16" else jnp.float16
        return _as(fields["w"], kind).astype(jnp.float32)
    scale = _half(fields["d"])
    if format == "Q6_K":
        factors = _as(fields["scales"], jnp.int8).astype(jnp.float32)
        return _grouped(scale * factors, _six_bits(fields["ql"], fields["qh"]) - 32)
    if format.endswith("_K"):
        factors, minimums = _six_bit_factors(fields["scales"])
        codes = _halves_of_pairs(fields["qs"])
        if "qh" in fields:
            codes = codes | _bits_by_group(fields["qh"])
        return _grouped(scale * factors, codes) - _grouped(_half(fields["dmin"]) * minimums, jnp.ones_like(codes))
    if format == "Q8_0":
        return scale * _as(fields["qs"], jnp.int8).astype(jnp.float32)
    codes = jnp.concatenate([fields["qs"] & 15, fields["qs"] >> 4], axis=-1)
    if "qh" in fields:
        codes = codes | (_bits(fields["qh"]) << 4)
    if "m" in fields:
        return scale * codes.astype(jnp.float32) + _half(fields["m"])
    return scale * (codes.astype(jnp.float32) - (16 if "qh" in fields else 8))


def _as(field: Array, kind: jax.typing.DTypeLike) -> Array:
    """Reinterpret the bytes of `field` as numbers of type `kind`."""
    size = jnp.dtype(kind).itemsize
    return lax.bitcast_convert_type(field if size == 1 else field.reshape(*field.shape[:-1], -1, size), kind)


def _half(field: Array) -> Array:
    """Return the float16 numbers in `field` as float32, one per block."""
    return _as(field, jnp.float16).astype(jnp.float32)


def _grouped(scales: Array, codes: Array) -> Array:
    """Return the product of `codes` and the scales of their groups of consecutive values."""
    groups = codes.reshape(*scales.shape, -1).astype(jnp.float32)
    return (scales[..., None] * groups).reshape(codes.shape)


def _shifted(field: Array, counts: range, axis: int) -> Array:
    """Return `field`, whose `axis` has the size 1, shifted to the right by each of `counts` along that axis."""
    shape = [1] * field.ndim
    shape[axis] = len(counts)
    return field >> jnp.array(counts, jnp.uint8).reshape(shape)


def _bits(field: Array) -> Array:
    """Return the bits of `field`, the lowest first."""
    bits = _shifted(field[..., None], range(8), axis=-1) & 1
    return bits.reshape(*field.shape[:-1], -1)


def _halves_of_pairs(field: Array) -> Array:
    """Return 4-bit codes. The low halves of 32 bytes hold one group, and the high halves hold the next."""
    pairs = field.reshape(*field.shape[:-1], -1, 1, 32)
    return jnp.concatenate([pairs & 15, pairs >> 4], axis=-2).reshape(*field.shape[:-1], -1)


def _bits_by_group(field: Array) -> Array:
    """Return the fifth bits of codes, as 0 or 16. Bit g of each of the 32 bytes belongs to group g."""
    bits = (_shifted(field[..., None, :], range(8), axis=-2) & 1) << 4
    return bits.reshape(*field.shape[:-1], -1)


def _six_bit_factors(field: Array) -> tuple[Array, Array]:
    """Return the factors of the scales and the minimums of eight groups, 6 bits each, from 12 bytes."""
    first, second, third = jnp.split(field, 3, axis=-1)
    scales = jnp.concatenate([first & 63, (third & 15) | (first >> 2 & 48)], axis=-1)
    minimums = jnp.concatenate([second & 63, (third >> 4) | (second >> 2 & 48)], axis=-1)
    return scales.astype(jnp.float32), minimums.astype(jnp.float32)


def _six_bits(low: Array, high: Array) -> Array:
    """Return Q6_K's codes as int8, from 4 low bits in 128 bytes and 2 high bits in 64 bytes."""
    lows = low.reshape(*low.shape[:-1], 2, 1, 64)
    lows = jnp.concatenate([lows & 15, lows >> 4], axis=-2).reshape(*low.shape[:-1], 2, 4, 32)
    highs = _shifted(high.reshape(*high.shape[:-1], 2, 1, 32), range(0, 8, 2), axis=-2) & 3
    return (lows | highs << 4).astype(jnp.int8).reshape(*low.shape[:-1], -1)
