# pyright: reportUnknownArgumentType=false
"""The end of a block as one Pallas kernel for NVIDIA GPUs.

The kernel sums the parts of a product, adds the sum to the residual stream and norms the result. A product with few
rows must be split along the dimension that it sums over, or it keeps only a few of a GPU's processors busy. XLA would
then add the parts in one kernel and compute the norm in the next.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jspec.models.kernels import Ref

_TILE = 64  # columns that a processor multiplies at once, as in XLA's products
_TILES = 384  # enough to keep an H100 busy
_MOST = 16
_WARPS = 32  # the fastest on an H200 (`python -m bench gpu --step constants`)


def project_add_norm(
    x: Array, inner: Array, weight: Array, gamma: Array, *, eps: float, interpret: bool = False
) -> tuple[Array, Array]:
    """Return the residual stream after a block, and its norm.

    Args:
        x: ``[B, S, E]``, bfloat16, the stream before the block.
        inner: ``[B, S, I]``, the input of the block's last projection.
        weight: ``[I, E]``, the weight of that projection.
        gamma: ``[E]``, the weight of the norm that follows. See `jspec.models.layers.RMSNorm`.
        eps: the epsilon of the norm.
        interpret: whether to interpret the kernel, which is slow but runs on any platform.

    Returns:
        ``x + inner weight`` and its norm, ``[B, S, E]`` each.
    """
    size, count = x.shape[-1], _num_parts(*weight.shape)
    rows = inner.reshape(-1, count, weight.shape[0] // count)
    parts = jnp.einsum("rni,nio->nro", rows, weight.reshape(count, -1, size), preferred_element_type=jnp.float32)
    like = jax.ShapeDtypeStruct((len(rows), size), x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    row = pl.BlockSpec((None, size), lambda r: (r, 0))
    results = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(len(rows),),
        in_specs=[row, pl.BlockSpec((count, None, size), lambda r: (0, r, 0)), pl.BlockSpec((size,), lambda r: (0,))],
        out_specs=[row, row],
        out_shape=[like, like],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x.reshape(-1, size), parts, gamma)
    stream, normed = (result.reshape(x.shape) for result in results)
    return stream, normed


def _num_parts(inner: int, size: int) -> int:
    """Return a power of two that divides the summed dimension and is large enough for `_TILES` tiles."""
    count = 1
    while count < _MOST and count * size < _TILES * _TILE and inner % (2 * count) == 0:
        count *= 2
    return count


def _kernel(x_ref: Ref, parts_ref: Ref, gamma_ref: Ref, stream_ref: Ref, normed_ref: Ref, *, eps: float) -> None:
    """Process one row."""
    size, dtype = x_ref.shape[0], x_ref.dtype
    at = jnp.arange(pl.next_power_of_2(size))
    load = functools.partial(triton.load, mask=at < size, other=0)
    product = functools.reduce(jnp.add, [load(parts_ref.at[part, at]) for part in range(parts_ref.shape[0])])
    stream = load(x_ref.at[at]) + product.astype(dtype)
    wide = stream.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.sum(wide * wide) / size + eps)
    triton.store(stream_ref.at[at], stream, mask=at < size)
    triton.store(normed_ref.at[at], load(gamma_ref.at[at]) * wide.astype(dtype), mask=at < size)
