"""The KV cache: allocated once, at a fixed shape, and never moved.

Slot t holds position t. A row's validity is one number, its length: a query at position t looks at slots 0..t, and
whatever lies beyond is overwritten before it is looked at. So rolling back is keeping the smaller length.

The guesses of a tree are written in the order of its nodes, and a query looks at those on its own branch only; the path
that was accepted is then moved together (`keep`), so that slot t holds position t again.

A write must not reach past the last slot, for what becomes of it differs from platform to platform; callers allocate
K + 1 spare slots, so that none does.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.core.row_ops import update_rows
from jspec.core.tree import Branches
from jspec.core.types import pytree

_TILE = 8


@pytree
class KVCache:
    """Keys ``[B, G, D, T]`` and values ``[B, G, T, D]`` of every layer: as attention reads them.

    Attributes:
        rows: ``int32[B]``, all different, where there are more rows than the batch has: those that are its own. The
            others are left alone. None for all of them.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    rows: Any = None


def empty_cache(num_layers: int, shape: tuple[int, int, int, int], dtype: jnp.dtype) -> KVCache:
    """A cache of zeros; `shape` is that of the values, ``(B, G, T, D)``."""
    batch, groups, slots, size = shape
    keys = tuple(jnp.zeros((batch, groups, size, slots), dtype) for _ in range(num_layers))
    return KVCache(keys, tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)))


def whole_tiles(positions: int) -> int:
    """How many slots hold `positions`: whole tiles, for else GPUs would copy all values at every pass, to pad them."""
    return -(-positions // _TILE) * _TILE


def prefill(model: Any, tokens: Array, num_slots: int) -> Any:
    """The cache of `model` after reading ``tokens[B, P]`` from position 0, with room for `num_slots` positions.

    It is read with P slots and then put into the larger one: attention costs P x P and not P x `num_slots`.
    """
    batch, width = tokens.shape
    _, read = model.forward(tokens, model.new_cache(batch, width), jnp.zeros(batch, jnp.int32))
    return enlarged(model.new_cache(batch, num_slots), read)


def prefill_with_features(model: Any, tokens: Array, num_slots: int, features: Sequence[int]) -> tuple[Any, Array]:
    """`prefill`, and what `jspec.Llama.forward_with_features` tells, ``[B, P, F, E]``."""
    batch, width = tokens.shape
    start = jnp.zeros(batch, jnp.int32)
    _, told, read = model.forward_with_features(tokens, model.new_cache(batch, width), start, features)
    return enlarged(model.new_cache(batch, num_slots), read), told


def enlarged(rooms: Any, read: Any) -> Any:
    """`rooms`, a larger cache, with what has been read at its beginning."""
    return jax.tree.map(lambda room, part: lax.dynamic_update_slice(room, part, (0,) * room.ndim), rooms, read)


def own_rows(slots: Array, rows: Array | None) -> Array:
    """Those of a layer's keys or values that are the batch's, see `KVCache.rows`."""
    if rows is None:
        return slots
    return jnp.concatenate([lax.dynamic_slice_in_dim(slots, row, 1) for row in rows])


def write(slots: Array, new: Array, start: Array, axis: int, rows: Array | None = None) -> Array:
    """`slots`, of every row, with `new` from index ``start[b]`` of `axis` on; the other axes are alike.

    With `rows` row b of the batch is one of several, see `KVCache.rows`.
    """
    new = new.astype(slots.dtype)
    if rows is not None:  # nothing in the others: what lies out of bounds is dropped
        start = jnp.full(len(slots), slots.shape[axis], start.dtype).at[rows].set(start)
        return _put(slots, jnp.zeros((len(slots), *new.shape[1:]), new.dtype).at[rows].set(new), start, axis)
    if new.shape[axis] == slots.shape[axis]:  # as in a prefill; there is only one place for it
        return new
    return update_rows(slots, new, start, axis, functools.partial(_put, axis=axis))


def _put(slots: Array, new: Array, start: Array, axis: int) -> Array:
    """`write` of all rows at once.

    XLA's CPU kernels scatter no bfloat16: at every pass all slots would become float32, and bfloat16 again.
    """
    scatter, select = functools.partial(_scatter, axis=axis), functools.partial(_select, axis=axis)
    if slots.dtype == jnp.bfloat16:
        return lax.platform_dependent(slots, new, start, cpu=select, default=scatter)
    return scatter(slots, new, start)


def _select(slots: Array, new: Array, start: Array, axis: int) -> Array:
    """All slots anew: those that are written, and the others as they were."""
    size, count = slots.shape[axis], new.shape[axis]
    start = jnp.where((start >= 0) & (start + count <= size), start, size)  # dropped as a whole, as there
    at = jnp.expand_dims(jnp.arange(size)[None] - start[:, None], [i for i in (1, 2, 3) if i != axis])
    placed = new if count == 1 else jnp.take_along_axis(new, jnp.clip(at, 0, count - 1), axis=axis)
    return jnp.where((at >= 0) & (at < count), placed, slots)


def _scatter(slots: Array, new: Array, start: Array, axis: int) -> Array:
    """A scatter, row by row.

    Of a single update XLA would make a `dynamic_update_slice`, and on CPU fuse that twice, into the cache and into the
    product that reads it, each time with a copy of all slots. So there is one more update: it lies out of bounds and is
    dropped. It belongs to the row, so that a batch may be sharded.
    """
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(), scatter_dims_to_operand_dims=(axis - 1,)
    )

    def row(slots: Array, new: Array, start: Array) -> Array:
        at = jnp.stack([start, jnp.full_like(start, slots.shape[axis - 1])])[:, None]
        return lax.scatter(slots, at, jnp.stack([new, new]), dims, mode=lax.GatherScatterMode.FILL_OR_DROP)

    return jax.vmap(row)(slots, new, start)


def append(cache: KVCache, new: KVCache, start: Array) -> KVCache:
    """`cache` with the slots of `new` from position ``start[b]`` of row b on."""
    return KVCache(
        tuple(write(room, part, start, 3, cache.rows) for room, part in zip(cache.keys, new.keys, strict=True)),
        tuple(write(room, part, start, 2, cache.rows) for room, part in zip(cache.values, new.values, strict=True)),
        cache.rows,
    )


def copy_slots(cache: KVCache, source: Array, target: Array, start: Array, count: int) -> KVCache:
    """`cache` with `count` slots from `start` on, or the last so many, of row `source` in row `target`, too."""

    def copied(room: Array, axis: int) -> Array:
        at = [jnp.minimum(start, room.shape[axis] - count) if i == axis else jnp.zeros_like(start) for i in range(4)]
        sizes = [1 if i == 0 else count if i == axis else size for i, size in enumerate(room.shape)]
        part = lax.dynamic_slice(room, [source, *at[1:]], sizes)
        return lax.dynamic_update_slice(room, part, [target, *at[1:]])

    keys, values = (tuple(copied(room, axis) for room in rooms) for rooms, axis in ((cache.keys, 3), (cache.values, 2)))
    return KVCache(keys, values)


def visible(positions: Array, num_slots: int) -> Array:
    """``bool[B, S, T]``: the slots a query at ``positions[B, S]`` looks at."""
    return jnp.arange(num_slots)[None, None] <= positions[:, :, None]


def visible_branches(start: Array, branches: Branches, num_slots: int) -> Array:
    """``bool[B, S, T]``: all slots before ``start[b]``, where node 0 lies, and what `branches` says of those after."""
    seen = jnp.asarray(branches.visible)
    seen = jnp.broadcast_to(seen, (start.size, *seen.shape[-2:]))
    index = jnp.arange(num_slots)[None] - start[:, None]
    at = jnp.clip(index, 0, seen.shape[-1] - 1)
    among = jnp.take_along_axis(seen, jnp.broadcast_to(at[:, None], (*seen.shape[:2], num_slots)), axis=2)
    return (index < 0)[:, None] | ((index < seen.shape[-1])[:, None] & among)


def keep(cache: KVCache, start: Array, path: Array) -> KVCache:
    """The cache with the nodes of a path in the order of their depths.

    Args:
        cache: its slot ``start[b] + n`` holds node n of a tree.
        start: ``int32[B]``.
        path: ``int32[B, K]``, a node of each depth from 1 on; those that a row did not accept may be any.
    """
    slots = start[:, None] + path

    def moved(room: Array, axis: int) -> Array:
        at = slots.reshape(len(slots), *(-1 if i == axis else 1 for i in range(1, room.ndim)))
        nodes = jnp.take_along_axis(own_rows(room, cache.rows), at, axis=axis)
        return write(room, nodes, start + 1, axis, cache.rows)

    keys, values = (tuple(moved(room, axis) for room in rooms) for rooms, axis in ((cache.keys, 3), (cache.values, 2)))
    return KVCache(keys, values, cache.rows)
