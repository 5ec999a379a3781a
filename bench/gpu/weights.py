"""Models with random weights, generated on the device array by array.

XLA compiles a program for each shape in a second. One program for a whole model, as in `bench.pairs.random_llama`,
takes a minute or two for a GPU, because each array's random numbers need a separate kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jspec
from bench import abstract
from convert.config import LlamaConfig

_STD = 0.02
_CODE_STD = {"int8": 73.9, "int4": 4.61}  # standard deviations of uniform codes


def random_model(config: LlamaConfig, dtype: Any, seed: int, quantized: str | None = None) -> jspec.Llama:
    """Return a model with normally distributed matrices, or uniformly distributed codes. Norm weights are 1."""
    return filled(abstract.model(config, dtype, quantized), seed, quantized)


def filled(shapes: Any, seed: int, quantized: str | None = None) -> Any:
    """Return a pytree of shapes with random arrays in their place, as in `random_model`."""
    leaves, form = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [
        _array(key, leaf.shape, leaf.dtype, quantized if "scales" in str(path) else None)
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return form.unflatten(arrays)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "code_dtype"))
def _array(key: Array, shape: tuple[int, ...], dtype: Any, code_dtype: str | None) -> Array:
    """Return a random array or, if `code_dtype` is given, constant scales for codes of that type."""
    if code_dtype is not None:
        return jnp.full(shape, _STD / _CODE_STD[code_dtype], dtype)
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        codes = jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
        return codes if dtype == jnp.int8 else (codes >> 4).astype(dtype)
    return (_STD * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
