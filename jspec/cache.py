"""The KV cache: allocated once, at a fixed shape, and never moved.

Slot t holds position t. A row's validity is one number, its length: a query at position t looks at slots 0..t, and
whatever lies beyond is overwritten before it is looked at. So rolling back is keeping the smaller length.

A write past the last slot would be clamped, and overwrite good entries without an error; callers allocate K + 1 spare
slots instead.
"""

from typing import Any

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


def prefill(model: Any, tokens: Array, num_slots: int) -> Any:
    """The cache of `model` after reading ``tokens[B, P]`` from position 0, with room for `num_slots` positions.

    It is read with P slots and then enlarged: attention costs P x P and not P x `num_slots`.
    """
    batch, width = tokens.shape
    _, cache = model.forward(tokens, model.new_cache(batch, width), jnp.zeros(batch, jnp.int32))
    room = ((0, 0), (0, 0), (0, num_slots - width), (0, 0))
    return jax.tree.map(lambda slots: jnp.pad(slots, room), cache)


def write(slots: Array, new: Array, start: Array) -> Array:
    """``slots[B, G, T, D]`` with ``new[B, G, S, D]`` at slots ``start[b] .. start[b] + S - 1`` of each row."""

    def row(slots: Array, new: Array, start: Array) -> Array:
        return lax.dynamic_update_slice(slots, new.astype(slots.dtype), (0, start, 0))

    return jax.vmap(row)(slots, new, start)


def visible(positions: Array, num_slots: int) -> Array:
    """``bool[B, S, T]``: the slots a query at ``positions[B, S]`` looks at."""
    return jnp.arange(num_slots) <= positions[:, :, None]
