"""int8 and int4 matrices, and their products, for GPUs and TPUs.

XLA reads the codes inside a product of a few rows. A product of many rows widens int4 first (see `_by_groups`). On
CPUs, XLA widens the codes before the decoding loop, so quantised weights save memory between calls but no time. Native
kernels read `jspec.models.packed` instead.

The inputs of a group are contiguous. On an H200, XLA reads int8 up to 1.4 times as fast in this layout as in
``[in, out]``. On TPUs, the products of all groups write nothing but their sum (bench/NOTES.md).
"""

from typing import cast

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import ArrayLike

from jspec.models.products import einsum, project

_GROUP_SIZES = (128, 64, 32)  # inputs that share a scale in int4
MAX_REDUCTION_ROWS = 32  # with more rows, float16 uses matrix products on GPUs
ROWS_AT_ONCE = 8  # rows that a reduction multiplies while it reads the codes once


def group_size(inputs: int, kind: str) -> int:
    """Return the number of inputs per group. int8 has one group.

    For int4, it is the largest of 128, 64 and 32 that divides `inputs`, or `inputs`.
    """
    sizes = _GROUP_SIZES if kind == "int4" else ()
    return next((size for size in sizes if inputs % size == 0), inputs)


class QuantizedMatrix(nnx.Module):
    """A matrix whose weights are codes, each multiplied by the scale of its output and group of inputs.

    Attributes:
        codes: ``int8[groups, out, size]`` or ``int4[groups, out, size]``. Each group has `size` consecutive inputs.
        scales: ``float32[groups, out]``.
    """

    def __init__(self, codes: Array, scales: Array):
        self.codes = nnx.Param(codes)
        self.scales = nnx.Param(scales)

    @property
    def out_size(self) -> int:
        """The number of outputs."""
        return self.codes.shape[1]

    @property
    def in_size(self) -> int:
        """The number of inputs."""
        return self.codes.shape[0] * self.codes.shape[2]

    @property
    def format(self) -> str:
        """The type of the codes."""
        return str(self.codes.dtype)

    def multiply(self, x: Array) -> Array:
        """Return the product ``float32[..., out]`` for ``x[..., in]``."""
        rows = x.reshape(-1, x.shape[-1])
        arguments = rows, self.codes[...], self.scales[...]
        product = cast(Array, lax.platform_dependent(*arguments, cpu=_on_cpu, cuda=_on_cuda, default=_by_groups))
        return product.reshape(*x.shape[:-1], self.out_size)

    def widen(self) -> Array:
        """Return the matrix as ``float32[out, in]``."""
        return _widened(self.codes[...], self.scales[...])

    def take(self, rows: ArrayLike) -> Array:
        """Return the weights ``float32[..., in]`` of the outputs ``rows[...]``. Indices are clipped to valid ones."""
        rows = jnp.clip(jnp.asarray(rows, jnp.int32), 0, self.out_size - 1)
        return self.select(rows.reshape(-1)).widen().reshape(*rows.shape, -1)

    def select(self, rows: ArrayLike) -> "QuantizedMatrix":
        """Return a matrix that holds only the outputs ``rows[D]``, with unchanged values."""
        rows = jnp.asarray(rows, jnp.int32)
        codes = cast(Array, lax.platform_dependent(self.codes[...], rows, tpu=_taken_on_tpu, default=_taken))
        return QuantizedMatrix(codes, _taken(self.scales[...], rows))


def _taken(array: Array, rows: Array) -> Array:
    return jnp.take(array, rows, axis=1)


def _taken_on_tpu(codes: Array, rows: Array) -> Array:
    """Return the codes ``[groups, D, size]`` of the outputs ``rows[D]``.

    XLA on TPUs copies all codes to take rows from several groups, or only one row. Flat indices and at least two rows
    avoid both copies.
    """
    groups, outputs, size = codes.shape
    indices = jnp.arange(groups)[:, None] * outputs + jnp.pad(rows, (0, max(0, 2 - rows.size)))
    return jnp.take(codes.reshape(-1, size), indices, axis=0)[:, : rows.size]


def _widened(codes: Array, scales: Array) -> Array:
    weight = codes.astype(jnp.float32) * scales[..., None]
    return jnp.moveaxis(weight, 0, 1).reshape(codes.shape[1], -1)


def _on_cpu(x: Array, codes: Array, scales: Array) -> Array:
    """Return the product ``float32[M, out]`` with the operands in the order that is fast on CPUs, as in `project`.

    The barriers keep XLA from fusing the transposition and the conversion into the product. XLA can then move both
    steps out of a decoding loop.
    """
    codes = lax.optimization_barrier(codes.swapaxes(1, 2)).astype(jnp.float32)
    weight = lax.optimization_barrier((codes * scales[:, None]).reshape(-1, codes.shape[2]))
    return project(weight, x.astype(jnp.float32)[None])[0]


def _on_cuda(x: Array, codes: Array, scales: Array) -> Array:
    """Return the product ``float32[M, out]``.

    On GPUs before Ampere, XLA's matrix products cannot read codes, but its reductions can. jspec uses float16 there by
    default, so float16 activations choose reductions, on newer GPUs, too.
    """
    if x.dtype == jnp.float16 and ROWS_AT_ONCE < len(x) <= MAX_REDUCTION_ROWS:
        chunks = range(0, len(x), ROWS_AT_ONCE)
        return jnp.concatenate([_on_cuda(x[at : at + ROWS_AT_ONCE], codes, scales) for at in chunks])
    if x.dtype == jnp.float16 and len(x) <= ROWS_AT_ONCE:
        wide, rows = codes.astype(jnp.float32), x.astype(jnp.float32).reshape(len(x), len(codes), 1, -1)
        return jnp.stack([(row * wide).sum(axis=2) * scales for row in rows]).sum(axis=1)
    return _by_groups(x, codes, scales)


def _by_groups(x: Array, codes: Array, scales: Array) -> Array:
    """Return the product ``float32[M, out]`` as a sum of scaled products, one per group.

    If the float32 products of all groups take at least as much memory as the matrix in 16 bits, the matrix is widened
    instead, and rounded to the dtype of x. A single row is padded to two. Otherwise, XLA would write an intermediate
    matrix to memory, both on GPUs (see `jspec.models.products`) and on TPUs.
    """
    if len(x) == 1:
        return _by_groups(jnp.pad(x, ((0, 1), (0, 0))), codes, scales)[:1]
    groups, _, size = codes.shape
    if groups > 1 and 2 * len(x) >= size:
        return einsum("mi,oi->mo", x, _widened(codes, scales).astype(x.dtype), jnp.float32)
    parts = einsum("mgi,goi->gmo", x.reshape(len(x), groups, size), codes.astype(x.dtype), jnp.float32)
    return (parts * scales[:, None]).sum(axis=0)
