"""Rows of a batch, each of which is read or written at a place of its own."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

# A program for TPUs has an update for every row up to so many; beyond, it would grow too long.
_UNROLLED = 32


def prefix_mask(lengths: Array, size: int) -> Array:
    """Return ``bool[B, size]``: which of `size` columns are among the first ``lengths[b]`` of row b."""
    return jnp.arange(size)[None] < lengths[:, None]


def slice_rows(rows: Array, start: Array, size: int) -> Array:
    """``rows[b, start[b] : start[b] + size]`` of every row."""

    def together(rows: Array, start: Array) -> Array:
        return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, size))(rows, start)

    def one_by_one(rows: Array, start: Array) -> Array:
        return jnp.stack([lax.dynamic_slice_in_dim(rows[b], start[b], size) for b in range(len(rows))])

    return _by_platform(len(rows), together, one_by_one, rows, start)


def write_rows(rows: Array, new: Array, start: Array) -> Array:
    """`rows` with ``new[b]`` from index ``start[b]`` of row b on."""

    def together(rows: Array, new: Array, start: Array) -> Array:
        return jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))(rows, new, start)

    return update_rows(rows, new, start, 1, together)


def update_rows(rows: Array, new: Array, start: Array, axis: int, together: Callable[..., Array]) -> Array:
    """``together(rows, new, start)``, which puts ``new[b]`` into row b from index ``start[b]`` of `axis` on.

    What lies within the rows must do so as a whole: beyond their end the two forms differ.
    """

    def one_by_one(rows: Array, new: Array, start: Array) -> Array:
        for b in range(len(rows)):
            at = [start[b] if i == axis else jnp.asarray(b if i == 0 else 0, start.dtype) for i in range(rows.ndim)]
            rows = lax.dynamic_update_slice(rows, new[b : b + 1], at)
        return rows

    return _by_platform(len(rows), together, one_by_one, rows, new, start)


def tally(counts: Array, tokens: Array, more: Array) -> Array:
    """``counts[B, V]`` with ``more[B, n]`` added at ``tokens[B, n]``, which is 0 where a token is none of V."""

    def together(counts: Array, tokens: Array, more: Array) -> Array:
        # Row by row: with the row as an index, devices that share the batch would exchange the counts.
        return jax.vmap(lambda counts, tokens, more: counts.at[tokens].add(more))(counts, tokens, more)

    def by_token(counts: Array, tokens: Array, more: Array) -> Array:
        meant = tokens[..., None] == jnp.arange(counts.shape[-1])[None, None]
        return counts + jnp.where(meant, more[..., None], 0).sum(axis=1, dtype=counts.dtype)

    return lax.platform_dependent(counts, tokens, more, tpu=by_token, default=together)


def _by_platform(count: int, together: Callable, one_by_one: Callable, *arguments: Array) -> Array:
    """On TPUs a gather or scatter over rows is a loop that does one after another, and waits each time.

    Where several TPUs share the rows, they exchange some of what is written; with the loop they would not.
    """
    if count > _UNROLLED:
        return together(*arguments)
    return lax.platform_dependent(*arguments, tpu=one_by_one, default=together)
