# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""JAX's default random numbers (Threefry), with an unrolled hash on CPUs.

On CPUs, JAX computes the Threefry hash in a loop of many small kernels. Starting them takes longer than hashing the few
numbers that a round needs. The unrolled hash is a single kernel and returns the same numbers.
"""

import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import define_prng_impl, threefry2x32_p, threefry_prng_impl

from jspec.core.sharding import vary_like

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def with_unrolled_hash(keys: Array) -> Array:
    """Return typed keys that yield the same random numbers as `keys`, faster on CPUs.

    Return `keys` itself if they use another PRNG implementation, or if ``jax_threefry_partitionable`` is off.
    """
    partitionable: bool = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if str(jax.random.key_impl(keys)) != "threefry2x32" or not partitionable:
        return keys
    return jax.random.wrap_key_data(jax.random.key_data(keys), impl=_IMPL)


def _hash(k1: Array, k2: Array, x1: Array, x2: Array) -> tuple[Array, Array]:
    """Return two words of 32 bits for each counter ``(x1, x2)`` (Salmon et al. 2011, Threefry-2x32-20)."""

    def jax_hash(*words: Array) -> tuple[Array, Array]:
        first, second = threefry2x32_p.bind(*words)
        return vary_like((first, second), words)  # inside `jax.shard_map`, `bind` loses the axes of its arguments

    return cast(tuple[Array, Array], lax.platform_dependent(k1, k2, x1, x2, cpu=_unrolled, default=jax_hash))


def _unrolled(k1: Array, k2: Array, x1: Array, x2: Array) -> tuple[Array, Array]:
    keys = k1, k2, k1 ^ k2 ^ np.uint32(0x1BD11BDA)
    x1, x2 = x1 + k1, x2 + k2
    for step in range(5):
        for rotation in _ROTATIONS[step % 2]:
            x1 = x1 + x2
            x2 = (x2 << np.uint32(rotation) | x2 >> np.uint32(32 - rotation)) ^ x1
        x1, x2 = x1 + keys[(step + 1) % 3], x2 + keys[(step + 2) % 3] + np.uint32(step + 1)
    return x1, x2


def _fold_in(key: Array, number: Array | int) -> Array:
    return jnp.stack(_hash(key[0], key[1], jnp.uint32(0), jnp.asarray(number, jnp.uint32)))


def _random_bits(key: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    counters = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    first, second = _hash(key[0], key[1], jnp.zeros_like(counters), counters)
    if bit_width == 64:
        return first.astype(jnp.uint64) << 32 | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{bit_width}")


_IMPL = define_prng_impl(
    key_shape=(2,),
    seed=threefry_prng_impl.seed,
    split=threefry_prng_impl.split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="jspec threefry",
    tag="jspec",
)
