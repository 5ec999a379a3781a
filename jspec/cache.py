"""The KV cache: allocated once, at a fixed shape, and never moved.

Slot t holds position t. A row's validity is one number, its length: a query at position t looks at slots 0..t, and
whatever lies beyond is overwritten before it is looked at. So rolling back is keeping the smaller length.

A write past the last slot would be clamped, and overwrite good entries without an error; callers allocate K + 1 spare
slots instead.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.types import pytree


@pytree
class KVCache:
    """Keys and values of every layer, each ``[B, G, T, D]``: heads outside, so that attention needs no transpose."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def empty_cache(num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> KVCache:
    """A cache of zeros; `shape` is ``(B, G, T, D)``."""

    def layers() -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(num_layers))

    return KVCache(layers(), layers())


def write(slots: Array, new: Array, start: Array) -> Array:
    """``slots[B, G, T, D]`` with ``new[B, G, S, D]`` at slots ``start[b] .. start[b] + S - 1`` of each row."""

    def row(slots: Array, new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(slots, new.astype(slots.dtype), (0, start, 0))

    return jax.vmap(row)(slots, new, start)


def visible(positions: Array, num_slots: int) -> Array:
    """``bool[B, S, T]``: the slots a query at ``positions[B, S]`` looks at."""
    return jnp.arange(num_slots) <= positions[:, :, None]
