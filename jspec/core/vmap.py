# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""A batching rule that turns an axis added by `jax.vmap` into more rows of one batch."""

from collections.abc import Callable
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from jspec.core.types import PyTree

Rows = TypeVar("Rows")
Results = TypeVar("Results")


def fold_vmap(program: Callable[[PyTree, Rows], Results]) -> Callable[[PyTree, Rows], Results]:
    """Return ``program(models, rows)`` with a batching rule that calls it once, with the rows of the whole axis.

    Without this rule, `jax.vmap` would batch every operation of a decoding loop, and each step would copy all caches.
    If the models themselves are mapped, there is no common batch. The rule then runs one call after another.

    Args:
        program: a function whose rows do not affect each other. The first axis of every array in `rows` and in the
            result holds the rows, all in the same order. It may hold several consecutive entries for each row.
    """
    folded = custom_vmap(program)

    @folded.def_vmap
    def _(size: int, mapped: tuple[PyTree, PyTree], models: PyTree, rows: Rows) -> tuple[Results, PyTree]:
        if any(jax.tree.leaves(mapped[0])):
            results = _one_by_one(folded, mapped, (models, rows))
        else:
            together = folded(models, jax.tree.map(lambda leaf, flag: _merged(leaf, size, flag), rows, mapped[1]))
            results = jax.tree.map(lambda leaf: leaf.reshape(size, len(leaf) // size, *leaf.shape[1:]), together)
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_jvp
    def run(models: PyTree, rows: Rows) -> Results:
        return folded(models, rows)

    @run.defjvp
    def _(primals: tuple[PyTree, Rows], tangents: tuple[PyTree, Rows]) -> tuple[Results, Results]:
        return jax.jvp(program, primals, tangents)  # `custom_vmap` cannot be linearised

    return run


def _merged(leaf: Array, size: int, mapped: bool) -> Array:
    """Return the rows of all calls as one axis. If the array is not mapped, each call has the same rows."""
    leaf = leaf if mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))
    return leaf.reshape(size * leaf.shape[1], *leaf.shape[2:])


def _one_by_one(program: Callable[..., Results], mapped: PyTree, arguments: PyTree) -> Results:
    """Return the stacked results of one call after another. Arguments that are not mapped are not copied."""
    leaves, structure = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(mapped)

    def call(mapped_leaves: list[Array]) -> Results:
        parts = iter(mapped_leaves)
        return program(
            *structure.unflatten(next(parts) if flag else leaf for leaf, flag in zip(leaves, flags, strict=True))
        )

    return cast(Results, lax.map(call, [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag]))
