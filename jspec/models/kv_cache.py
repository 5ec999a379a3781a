"""The KV cache, which is allocated once with a fixed shape and never moved.

Slot t holds position t. A single number, the length, describes a row's valid part. A query at position t sees slots
0..t, and later slots are overwritten before any query sees them. Rolling back therefore only means keeping the smaller
length.

A tree's draft tokens are written in node order, and a query sees only those on its own branch. `keep` then compacts the
accepted path, so that slot t holds position t again.

A write must not reach past the last slot, because the effect differs between platforms. Callers allocate K + 1 spare
slots to ensure this.
"""

import functools
from collections.abc import Sequence
from typing import Protocol, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.core.row_ops import update_rows
from jspec.core.tree import Branches
from jspec.core.types import pytree

_TILE = 8


@pytree
class KVCache:
    """Keys ``[B, G, D, T]`` and values ``[B, G, T, D]`` of every layer, in the layout that attention reads.

    Attributes:
        rows: ``int32[B]``, the batch's own rows, if the cache has more rows than the batch. They must be distinct. The
            other rows do not change. None if all rows belong to the batch.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    rows: Array | None = None


class _Reader(Protocol):
    """The part of a `jspec.models.language_model.LanguageModel` that a prefill needs."""

    def new_cache(self, batch: int, slots: int) -> KVCache: ...

    def forward(self, tokens: Array, cache: KVCache, start: Array) -> tuple[Array, KVCache]: ...


class _FeatureReader(Protocol):
    """The part of a `jspec.Llama` that a prefill with features needs."""

    def new_cache(self, batch: int, slots: int) -> KVCache: ...

    def forward_with_features(
        self, tokens: Array, cache: KVCache, start: Array, features: Sequence[int]
    ) -> tuple[Array, Array, KVCache]: ...


def empty_cache(num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> KVCache:
    """Return a cache of zeros. `shape` is the shape of the values, ``(B, G, T, D)``."""
    batch, groups, slots, size = shape
    keys = tuple(jnp.zeros((batch, groups, size, slots), dtype) for _ in range(num_layers))
    return KVCache(keys, tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)))


def whole_tiles(positions: int) -> int:
    """Round `positions` up to whole tiles of slots. Otherwise, GPUs would copy and pad all values at every pass."""
    return -(-positions // _TILE) * _TILE


def prefill(model: _Reader, tokens: Array, num_slots: int) -> KVCache:
    """Prefill ``tokens[B, P]`` from position 0, and return the model's cache with room for `num_slots` positions.

    The prefill uses a cache of P slots, which is then copied into the larger cache. Attention therefore costs P x P,
    not P x `num_slots`.
    """
    batch, width = tokens.shape
    _, read = model.forward(tokens, model.new_cache(batch, width), jnp.zeros(batch, jnp.int32))
    return insert_prefix(model.new_cache(batch, num_slots), read)


def prefill_with_features(
    model: _FeatureReader, tokens: Array, num_slots: int, features: Sequence[int]
) -> tuple[KVCache, Array]:
    """Run `prefill`, and also return the features from `jspec.Llama.forward_with_features`, ``[B, P, F, E]``."""
    batch, width = tokens.shape
    start = jnp.zeros(batch, jnp.int32)
    _, target_features, read = model.forward_with_features(tokens, model.new_cache(batch, width), start, features)
    return insert_prefix(model.new_cache(batch, num_slots), read), target_features


def insert_prefix(cache: KVCache, prefix: KVCache) -> KVCache:
    """Return `cache` with the shorter cache `prefix` copied to its beginning."""

    def copy(slots: Array, part: Array) -> Array:
        return lax.dynamic_update_slice(slots, part, (0,) * slots.ndim)

    return jax.tree.map(copy, cache, prefix)


def own_rows(slots: Array, rows: Array | None) -> Array:
    """Return the batch's rows of a layer's keys or values. See `KVCache.rows`."""
    if rows is None:
        return slots
    return jnp.concatenate([lax.dynamic_slice_in_dim(slots, row, 1) for row in rows])


def write(slots: Array, new: Array, start: Array, axis: int, rows: Array | None = None) -> Array:
    """Return `slots` with `new` written to every row, starting at index ``start[b]`` of `axis`.

    The other axes of `slots` and `new` must match. With `rows`, the batch owns only some rows of the cache. See
    `KVCache.rows`.
    """
    new = new.astype(slots.dtype)
    if rows is not None:  # leave the other rows alone: an out-of-bounds write is dropped
        start = jnp.full(len(slots), slots.shape[axis], start.dtype).at[rows].set(start)
        return _put(slots, jnp.zeros((len(slots), *new.shape[1:]), new.dtype).at[rows].set(new), start, axis)
    if new.shape[axis] == slots.shape[axis]:  # as in a prefill; only one start is possible
        return new
    return update_rows(slots, new, start, axis, functools.partial(_put, axis=axis))


def _put(slots: Array, new: Array, start: Array, axis: int) -> Array:
    """Write all rows at once. See `write`.

    XLA's CPU kernels cannot scatter bfloat16. They would convert all slots to float32 and back at every pass.
    """
    scatter, select = functools.partial(_scatter, axis=axis), functools.partial(_select, axis=axis)
    if slots.dtype == jnp.bfloat16:
        return cast(Array, lax.platform_dependent(slots, new, start, cpu=select, default=scatter))
    return scatter(slots, new, start)


def _select(slots: Array, new: Array, start: Array, axis: int) -> Array:
    """Rebuild all slots: written slots get their new values, and all other slots stay the same."""
    size, count = slots.shape[axis], new.shape[axis]
    start = jnp.where((start >= 0) & (start + count <= size), start, size)  # drop the whole write, as `_scatter` does
    at = jnp.expand_dims(jnp.arange(size)[None] - start[:, None], [i for i in (1, 2, 3) if i != axis])
    placed = new if count == 1 else jnp.take_along_axis(new, jnp.clip(at, 0, count - 1), axis=axis)
    return jnp.where((at >= 0) & (at < count), placed, slots)


def _scatter(slots: Array, new: Array, start: Array, axis: int) -> Array:
    """Scatter row by row.

    XLA would turn a single update into a `dynamic_update_slice`. On CPU, XLA would fuse that slice twice, into the
    cache and into the product that reads the cache, and copy all slots each time. Each row therefore has a second
    update, which is out of bounds and is dropped. This update is part of the row, so that a batch can be sharded.
    """
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(), scatter_dims_to_operand_dims=(axis - 1,)
    )

    def row(slots: Array, new: Array, start: Array) -> Array:
        at = jnp.stack([start, jnp.full_like(start, slots.shape[axis - 1])])[:, None]
        return lax.scatter(slots, at, jnp.stack([new, new]), dims, mode=lax.GatherScatterMode.FILL_OR_DROP)

    return jax.vmap(row)(slots, new, start)


def append(cache: KVCache, new: KVCache, start: Array) -> KVCache:
    """Return `cache` with the slots of `new` written to each row b, starting at position ``start[b]``."""
    return KVCache(
        tuple(write(room, part, start, 3, cache.rows) for room, part in zip(cache.keys, new.keys, strict=True)),
        tuple(write(room, part, start, 2, cache.rows) for room, part in zip(cache.values, new.values, strict=True)),
        cache.rows,
    )


def copy_slots(cache: KVCache, source: Array, target: Array, start: Array, count: int) -> KVCache:
    """Return `cache` with `count` slots of row `source` copied to row `target`.

    The copy begins at slot `start`. If fewer than `count` slots remain from there, the last `count` slots are copied.
    """

    def copied(room: Array, axis: int) -> Array:
        at = [jnp.minimum(start, room.shape[axis] - count) if i == axis else jnp.zeros_like(start) for i in range(4)]
        sizes = [1 if i == 0 else count if i == axis else size for i, size in enumerate(room.shape)]
        part = lax.dynamic_slice(room, [source, *at[1:]], sizes)
        return lax.dynamic_update_slice(room, part, [target, *at[1:]])

    keys, values = (tuple(copied(room, axis) for room in rooms) for rooms, axis in ((cache.keys, 3), (cache.values, 2)))
    return KVCache(keys, values)


def visible(positions: Array, num_slots: int) -> Array:
    """Return ``bool[B, S, T]``: the slots that a query at ``positions[B, S]`` sees."""
    return jnp.arange(num_slots)[None, None] <= positions[:, :, None]


def visible_branches(start: Array, branches: Branches, num_slots: int) -> Array:
    """Return ``bool[B, S, T]``: all slots before ``start[b]``, the slot of node 0, and those visible in `branches`."""
    seen = jnp.asarray(branches.visible)
    seen = jnp.broadcast_to(seen, (start.size, *seen.shape[-2:]))
    index = jnp.arange(num_slots)[None] - start[:, None]
    at = jnp.clip(index, 0, seen.shape[-1] - 1)
    among = jnp.take_along_axis(seen, jnp.broadcast_to(at[:, None], (*seen.shape[:2], num_slots)), axis=2)
    return (index < 0)[:, None] | ((index < seen.shape[-1])[:, None] & among)


def keep(cache: KVCache, start: Array, path: Array) -> KVCache:
    """Return the cache with a path's nodes moved into consecutive slots, in order of depth.

    Args:
        cache: the KV cache, whose slot ``start[b] + n`` holds node n of a tree.
        start: ``int32[B]``, the slot of node 0.
        path: ``int32[B, K]``, one node per depth, starting at depth 1. Entries past a row's accepted path are
            arbitrary.
    """
    slots = start[:, None] + path

    def moved(room: Array, axis: int) -> Array:
        at = slots.reshape(len(slots), *(-1 if i == axis else 1 for i in range(1, room.ndim)))
        nodes = jnp.take_along_axis(own_rows(room, cache.rows), at, axis=axis)
        return write(room, nodes, start + 1, axis, cache.rows)

    keys, values = (tuple(moved(room, axis) for room in rooms) for rooms, axis in ((cache.keys, 3), (cache.values, 2)))
    return KVCache(keys, values, cache.rows)
