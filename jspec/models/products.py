"""Products of activations with a weight ``[in, out]``, in the form that is fastest on each platform."""

import functools
import math
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


def einsum(formula: str, a: Array, b: Array, dtype: DTypeLike | None = None) -> Array:
    """Run `jnp.einsum` with a result of `dtype`, at full float32 precision (not the default on GPUs and TPUs)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(formula, a, b, precision=precision, preferred_element_type=dtype)


def project(weight: Array, x: Array, dtype: DTypeLike | None = None) -> Array:
    """Return the product ``[B, S, out]`` of ``x[B, S, in]`` and ``weight[in, out]``, in `dtype` or the dtype of x.

    Float32 weights are stored as ``[in, out]`` and are the first operand of the product. XLA's CPU kernels then read
    them at almost full memory bandwidth, for one row or a few rows. In half precision, CPUs do not support that order.
    On other devices, the order does not matter.
    """
    product = functools.partial(_product, dtype=dtype)
    if math.prod(x.shape[:-1]) != 1:
        return product(weight, x)
    of_two = functools.partial(_of_two_rows, product)
    if weight.dtype == jnp.bfloat16:
        return of_two(weight, x)
    return cast(Array, lax.platform_dependent(weight, x, cuda=of_two, default=product))


def _product(weight: Array, x: Array, dtype: DTypeLike | None) -> Array:
    if weight.dtype == jnp.float32:
        rows = einsum("io,ri->or", weight, x.reshape(-1, x.shape[-1]), dtype)
        return rows.T.reshape(*x.shape[:-1], -1)
    product = functools.partial(einsum, "bsi,io->bso", dtype=dtype)
    if weight.dtype == x.dtype == jnp.bfloat16:
        return cast(
            Array, lax.platform_dependent(x, weight, cpu=functools.partial(_product_of_halves, dtype), default=product)
        )
    return product(x, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product_of_halves(dtype: DTypeLike | None, x: Array, weight: Array) -> Array:
    """Multiply bfloat16 arrays; XLA's CPU kernels support only a float32 result."""
    return einsum("bsi,io->bso", x, weight, jnp.float32).astype(dtype or x.dtype)


def _gradients_of_halves(
    dtype: DTypeLike | None, residuals: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array]:
    """Compute the gradients as bfloat16 products. By default, they would be float32 products."""
    x, weight = residuals
    cotangent = cotangent.astype(x.dtype)
    of_x = einsum("bso,io->bsi", cotangent, weight, jnp.float32)
    of_weight = einsum("bsi,bso->io", x, cotangent, jnp.float32)
    return of_x.astype(x.dtype), of_weight.astype(weight.dtype)


def _halves_and_product(dtype: DTypeLike | None, x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product_of_halves(dtype, x, weight), (x, weight)


_product_of_halves.defvjp(_halves_and_product, _gradients_of_halves)


def _of_two_rows(product: Callable[[Array, Array], Array], weight: Array, x: Array) -> Array:
    """Return ``product(weight, x)`` for an x with one row, computed with a second row of zeros.

    On GPUs, XLA turns a single-row product into a sum over a matrix, which it may first write to memory. That matrix is
    the product of a small weight and the row, or a whole output head in float32. On CPUs, that sum is slower in
    bfloat16.
    """
    return product(weight, jnp.pad(x, ((0, 0), (0, 1), (0, 0))))[:, :1]
