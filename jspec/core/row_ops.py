# pyright: reportUnknownArgumentType=false
"""Functions that read or write batch rows, each at its own position."""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax

# Up to this many rows, a TPU program has one update per row. With more rows, the program would become too long.
_UNROLLED = 32


def prefix_mask(lengths: Array, size: int) -> Array:
    """Return ``bool[B, size]``, a mask of the first ``lengths[b]`` columns of each row b."""
    return jnp.arange(size)[None] < lengths[:, None]


def slice_rows(rows: Array, start: Array, size: int) -> Array:
    """Return ``rows[b, start[b] : start[b] + size]`` for every row b."""

    def together(rows: Array, start: Array) -> Array:
        return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, size))(rows, start)

    def one_by_one(rows: Array, start: Array) -> Array:
        return jnp.stack([lax.dynamic_slice_in_dim(rows[b], start[b], size) for b in range(len(rows))])

    return _by_platform(len(rows), together, one_by_one, rows, start)


def write_rows(rows: Array, new: Array, start: Array) -> Array:
    """Return `rows` with ``new[b]`` written to row b, starting at index ``start[b]``."""

    def together(rows: Array, new: Array, start: Array) -> Array:
        return jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, 0))(rows, new, start)

    return update_rows(rows, new, start, 1, together)


def update_rows(rows: Array, new: Array, start: Array, axis: int, together: Callable[..., Array]) -> Array:
    """Return ``together(rows, new, start)``, which writes ``new[b]`` to row b starting at index ``start[b]`` of `axis`.

    A write that starts within its row must also end within it, because the two implementations handle writes past
    the end differently.
    """

    def one_by_one(rows: Array, new: Array, start: Array) -> Array:
        for b in range(len(rows)):
            at = [start[b] if i == axis else jnp.asarray(b if i == 0 else 0, start.dtype) for i in range(rows.ndim)]
            rows = lax.dynamic_update_slice(rows, new[b : b + 1], at)
        return rows

    return _by_platform(len(rows), together, one_by_one, rows, new, start)


def tally(counts: Array, tokens: Array, more: Array) -> Array:
    """Return ``counts[B, V]`` with ``more[B, n]`` added at ``tokens[B, n]``. `more` must be 0 for tokens outside V."""

    def together(counts: Array, tokens: Array, more: Array) -> Array:
        # Add row by row. If the row were an index, devices that share the batch would send each other the counts.
        return cast("Array", jax.vmap(lambda counts, tokens, more: counts.at[tokens].add(more))(counts, tokens, more))

    def by_token(counts: Array, tokens: Array, more: Array) -> Array:
        meant = tokens[..., None] == jnp.arange(counts.shape[-1])[None, None]
        return counts + jnp.where(meant, more[..., None], 0).sum(axis=1, dtype=counts.dtype)

    return cast("Array", lax.platform_dependent(counts, tokens, more, tpu=by_token, default=together))


def _by_platform(
    count: int, together: Callable[..., Array], one_by_one: Callable[..., Array], *arguments: Array
) -> Array:
    """Run `one_by_one` on TPUs if there are few rows, else `together`.

    On TPUs a gather or scatter over rows is a loop that processes one row at a time and waits after each row. If
    several TPUs share the rows, `one_by_one` transfers some of the written values between TPUs. The loop does not.
    """
    if count > _UNROLLED:
        return together(*arguments)
    return cast("Array", lax.platform_dependent(*arguments, tpu=one_by_one, default=together))
