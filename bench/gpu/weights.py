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
_INT8_STD = 73.9  # standard deviation of uniform bytes


def random_model(config: LlamaConfig, dtype: Any, seed: int, quantized: bool = False) -> jspec.Llama:
    """Return a model with normally distributed matrices, or uniform ones in int8. Norm weights are 1."""
    leaves, form = jax.tree_util.tree_flatten_with_path(abstract.model(config, dtype, quantized))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [
        _array(key, leaf.shape, leaf.dtype, "scale" in str(path))
        for key, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return form.unflatten(arrays)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "is_scale"))
def _array(key: Array, shape: tuple[int, ...], dtype: Any, is_scale: bool) -> Array:
    if is_scale:
        return jnp.full(shape, _STD / _INT8_STD, dtype)
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    if dtype == jnp.int8:
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.int8)
    return (_STD * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
