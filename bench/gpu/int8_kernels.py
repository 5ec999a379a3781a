"""Candidates for a product of a few rows with an int8 matrix, to find one that reads int8 at full bandwidth.

On an H200, XLA's product reads int8 at half of the bandwidth of bfloat16. Each candidate returns the unscaled product
``float32[R, out]`` of ``x[R, in]``, in bfloat16, and an int8 weight. The grid divides the columns, and it divides the
dimension that is summed over into `parts`. A weight is stored as ``[in, out]``, as in jspec, or as ``[out, in]``.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_LEAST = 16  # rows of the smallest tile that tensor cores multiply


def by_xla(x: Array, weight: Array) -> Array:
    """Multiply with a weight stored as ``[in, out]``, as jspec does."""
    return jnp.einsum("ri,io->ro", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)


def by_xla_transposed(x: Array, weight: Array) -> Array:
    """Multiply with a weight stored as ``[out, in]``."""
    return jnp.einsum("ri,oi->ro", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)


def by_tensor_cores(x: Array, weight: Array, *, tile: tuple[int, int], stages: int, parts: int) -> Array:
    """Multiply tiles of a weight stored as ``[in, out]`` on tensor cores."""
    return _call(_tensor_core_kernel, x, weight, tile, parts, 0, stages)


def by_tensor_cores_transposed(x: Array, weight: Array, *, tile: tuple[int, int], stages: int, parts: int) -> Array:
    """Multiply tiles of a weight stored as ``[out, in]`` on tensor cores, with the weight as the first operand."""
    return _call(_transposed_kernel, x, weight, tile, parts, 1, stages)


def by_scalar_units(x: Array, weight: Array, *, tile: tuple[int, int], unroll: int, parts: int) -> Array:
    """Multiply tiles of a weight stored as ``[in, out]`` number by number, with `unroll` loads in flight."""
    return _call(functools.partial(_scalar_kernel, unroll=unroll), x, weight, tile, parts, 0, 1)


def _call(
    kernel: Callable, x: Array, weight: Array, tile: tuple[int, int], parts: int, axis: int, stages: int
) -> Array:
    """Run `kernel` for every tile of columns and every part. `axis` is the weight's dimension that is summed over."""
    (rows, inner), (block, columns), size = x.shape, tile, weight.shape[1 - axis]
    shape, at = ((inner, columns), lambda n, p: (0, n)) if axis == 0 else ((columns, inner), lambda n, p: (n, 0))
    found = pl.pallas_call(
        functools.partial(kernel, block=block, each=inner // parts),
        grid=(size // columns, parts),
        in_specs=[pl.BlockSpec((rows, inner), lambda n, p: (0, 0)), pl.BlockSpec(shape, at)],
        out_specs=pl.BlockSpec((None, rows, columns), lambda n, p: (p, 0, n)),
        out_shape=jax.ShapeDtypeStruct((parts, rows, size), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=stages),
        interpret=jax.default_backend() != "gpu",
    )(x, weight)
    return jnp.sum(found, axis=0)


def _rows(x_ref: Any, start: Array, block: int) -> tuple[Array, Array, Array]:
    """Return a tile of x, padded with rows of zeros, the indices of its rows, and which of them exist."""
    rows, inner = jnp.arange(_LEAST), start + jnp.arange(block)
    real = rows < x_ref.shape[0]
    return triton.load(x_ref.at[rows[:, None], inner[None, :]], mask=real[:, None], other=0), rows, real


def _tensor_core_kernel(x_ref: Any, weight_ref: Any, out_ref: Any, *, block: int, each: int) -> None:
    first, columns = pl.program_id(1) * each, jnp.arange(weight_ref.shape[1])

    def add(i: Array, total: Array) -> Array:
        start = first + i * block
        x, *_ = _rows(x_ref, start, block)
        tile = triton.load(weight_ref.at[pl.ds(start, block), :]).astype(x.dtype)
        return total + jnp.dot(x, tile, preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, each // block, add, jnp.zeros((_LEAST, columns.size), jnp.float32))
    _, rows, real = _rows(x_ref, first, block)
    triton.store(out_ref.at[rows[:, None], columns[None, :]], total, mask=real[:, None])


def _transposed_kernel(x_ref: Any, weight_ref: Any, out_ref: Any, *, block: int, each: int) -> None:
    first, columns = pl.program_id(1) * each, jnp.arange(weight_ref.shape[0])

    def add(i: Array, total: Array) -> Array:
        start = first + i * block
        x, *_ = _rows(x_ref, start, block)
        tile = triton.load(weight_ref.at[:, pl.ds(start, block)]).astype(x.dtype)
        return total + jnp.dot(tile, x.T, preferred_element_type=jnp.float32)

    total = lax.fori_loop(0, each // block, add, jnp.zeros((columns.size, _LEAST), jnp.float32))
    _, rows, real = _rows(x_ref, first, block)
    triton.store(out_ref.at[rows[None, :], columns[:, None]], total, mask=real[None, :])


def _scalar_kernel(x_ref: Any, weight_ref: Any, out_ref: Any, *, block: int, each: int, unroll: int) -> None:
    """Keep a sum for every number in a tile, and add up the sums at the end."""
    first, columns = pl.program_id(1) * each, jnp.arange(weight_ref.shape[1])

    def add(i: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
        starts = [first + (i * unroll + u) * block for u in range(unroll)]
        tiles = [triton.load(weight_ref.at[pl.ds(start, block), :]) for start in starts]
        for start, tile in zip(starts, tiles, strict=True):
            totals = tuple(
                total + tile.astype(jnp.float32) * _numbers(x_ref, row, start, block)[:, None]
                for row, total in enumerate(totals)
            )
        return totals

    empty = (jnp.zeros((block, columns.size), jnp.float32),) * x_ref.shape[0]
    for row, total in enumerate(lax.fori_loop(0, each // (block * unroll), add, empty)):
        triton.store(out_ref.at[jnp.full_like(columns, row), columns], jnp.sum(total, axis=0))


def _numbers(x_ref: Any, row: int, start: Array, block: int) -> Array:
    inner = start + jnp.arange(block)
    return triton.load(x_ref.at[jnp.full_like(inner, row), inner]).astype(jnp.float32)
