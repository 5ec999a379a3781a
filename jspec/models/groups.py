"""Quantisation to packed matrices, in groups of 32 consecutive weights of an output, as in GGUF's Q8_0 and Q4_1.

Q8_0 stores 8-bit codes and a scale d per group, ``w ~ d code`` with ``d = max |w| / 127``. Q4_1 stores 4-bit codes, a
scale and a minimum m, ``w ~ d code + m`` with ``m = min w`` and ``d = (max w - min w) / 15``. Both are rounded to
float16 before the codes are computed, so that every code is the nearest one. ggml uses the unrounded scale instead.
"""

import functools
from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from convert.blocks import LANES, empty_tiles, row_bytes
from jspec.models.packed import PackedMatrix, tiled

GROUP = 32
_STEPS = {"Q8_0": 127.0, "Q4_1": 15.0}  # from 0 or the minimum to the largest value
_CHUNK = 1 << 22  # about the number of weights that are float32 at the same time


def quantized_part(part: PackedMatrix, format: str, bits: int, name: str) -> PackedMatrix:
    """Return `part` in `format`, or unchanged if its own format takes no more bytes. See `quantized_matrix`."""
    if row_bytes(part.format, part.in_size) <= row_bytes(format, part.in_size):
        return part
    return _quantized(_widened_chunks(part), (part.out_size, part.in_size), format, bits, name)


def quantized_matrix(weight: np.ndarray, format: str, bits: int, name: str) -> PackedMatrix:
    """Return ``weight[out, in]`` in `format`, "Q8_0" or "Q4_1", for activations of `bits` bits.

    Raises:
        ValueError: a weight is not finite, or a scale or minimum exceeds float16.
    """
    out_size, in_size = weight.shape
    count = _rows_at_once(in_size)
    chunks = (jnp.asarray(weight[at : at + count], jnp.float32) for at in range(0, out_size, count))
    return _quantized(chunks, (out_size, in_size), format, bits, name)


def _rows_at_once(in_size: int) -> int:
    return LANES * max(_CHUNK // (LANES * in_size), 1)


def _widened_chunks(part: PackedMatrix) -> Iterator[Array]:
    tiles, count = np.asarray(part.tiles[...]), _rows_at_once(part.in_size) // LANES
    for at in range(0, len(tiles), count):
        chunk = tiles[at : at + count]
        yield PackedMatrix(jnp.asarray(chunk), part.format, (len(chunk) * LANES, part.in_size)).widen()


def _quantized(chunks: Iterator[Array], shape: tuple[int, int], format: str, bits: int, name: str) -> PackedMatrix:
    """Return the matrix of `shape` whose rows are in `chunks`, each with a multiple of 16 rows except the last."""
    tiles, at = empty_tiles(-(-shape[0] // LANES), LANES * row_bytes(format, shape[1])), 0
    for chunk in chunks:
        groups = -(-len(chunk) // LANES) * LANES, shape[1] // GROUP
        steps = np.full(groups, _STEPS[format], np.float32)
        part, is_finite = cast(tuple[Array, Array], _tiles_of(chunk, steps, format))
        if not is_finite:
            raise ValueError(
                f"{name} has a value that is not finite or exceeds float16, which quantised weights cannot hold; do "
                "not quantize this model."
            )
        tiles[at : at + len(part)] = part
        at += len(part)
    return PackedMatrix(jax.device_put(tiles), format, shape, bits)


@functools.partial(jax.jit, static_argnums=2)
def _tiles_of(rows: Array, steps: ArrayLike, format: str) -> tuple[Array, Array]:
    """Return ``rows[N, in]`` in tiles of `format`, and whether all their scales and minimums are finite.

    `steps` has one equal number per group, because XLA would replace a division by a scalar with a product, whose
    rounding differs from that of ggml.
    """
    rows = jnp.pad(rows, ((0, -rows.shape[0] % LANES), (0, 0)))
    groups = rows.reshape(rows.shape[0], -1, GROUP)
    halves, codes = (_with_minimum if format == "Q4_1" else _with_scale)(groups, steps)
    is_finite = jnp.stack([jnp.isfinite(half).all() for half in halves.values()]).all()
    return tiled({name: _bytes(half) for name, half in halves.items()} | {"qs": codes}, format), is_finite


def _with_scale(groups: Array, steps: ArrayLike) -> tuple[dict[str, Array], Array]:
    """Return Q8_0's scales ``float16[N, groups]`` and codes ``uint8[N, groups, 32]``."""
    scale = (jnp.abs(groups).max(axis=-1) / steps).astype(jnp.float16)
    codes = jnp.clip(jnp.round(_divided(groups, scale)), -128, 127)
    return {"d": scale}, lax.bitcast_convert_type(codes.astype(jnp.int8), jnp.uint8)


def _with_minimum(groups: Array, steps: ArrayLike) -> tuple[dict[str, Array], Array]:
    """Return Q4_1's scales and minimums ``float16[N, groups]``, and two codes in each of ``uint8[N, groups, 16]``."""
    least = groups.min(axis=-1)
    scale, minimum = ((groups.max(axis=-1) - least) / steps).astype(jnp.float16), least.astype(jnp.float16)
    offsets = groups - minimum.astype(jnp.float32)[..., None]
    codes = jnp.clip(jnp.round(_divided(offsets, scale)), 0, 15).astype(jnp.uint8)
    low, high = jnp.split(codes, 2, axis=-1)
    return {"d": scale, "m": minimum}, low | high << 4


def _divided(groups: Array, scale: Array) -> Array:
    """Return `groups` over their scales; 0 for a scale of 0, which represents every code as the same weight."""
    wide = scale.astype(jnp.float32)[..., None]
    return jnp.where(wide == 0, 0, groups / jnp.where(wide == 0, 1, wide))


def _bytes(half: Array) -> Array:
    return lax.bitcast_convert_type(half, jnp.uint8)
