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


def fold_vmap(
    program: Callable[[PyTree, Array, Rows], Results],
) -> Callable[[PyTree, Array, Rows], Results]:
    """Return `program` with a batching rule that makes a single call for the whole mapped axis.

    Without this rule, `jax.vmap` would batch every operation of a decoding loop, and each step would copy all caches.
    The calls' rows for one prompt become neighbours, so that a sharded batch stays sharded. Prompts that are not mapped
    stay one batch, and get more rows each. If the models are mapped, the rule runs one call after another.

    Args:
        program: a function ``program(models, prompts, rows)`` whose rows do not affect each other. `prompts` has B
            rows. The first axis of every array in `rows` and in the result holds the same number of consecutive rows
            for each prompt.
    """
    folded = custom_vmap(program)

    @folded.def_vmap
    def _(size: int, mapped: PyTree, models: PyTree, prompts: Array, rows: Rows) -> tuple[Results, PyTree]:
        of_models, of_prompts, of_rows = mapped
        if any(jax.tree.leaves(of_models)):
            results = _one_by_one(folded, mapped, (models, prompts, rows))
        else:
            batch = prompts.shape[1 if of_prompts else 0]
            merged = jax.tree.map(lambda leaf, flag: _merged(leaf, size, batch, flag), rows, of_rows)
            prompts = _merged(prompts, size, batch, True) if of_prompts else prompts
            results = jax.tree.map(lambda leaf: _split(leaf, size, batch), folded(models, prompts, merged))
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_jvp
    def run(models: PyTree, prompts: Array, rows: Rows) -> Results:
        return folded(models, prompts, rows)

    @run.defjvp
    def _(primals: PyTree, tangents: PyTree) -> tuple[Results, Results]:
        return jax.jvp(program, primals, tangents)  # `custom_vmap` cannot be linearised

    return run


def _merged(leaf: Array, size: int, batch: int, mapped: bool) -> Array:
    """Return the rows of all calls as one axis, by prompt. If the array is not mapped, each call has the same rows."""
    leaf = leaf if mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))
    by_prompt = jnp.moveaxis(leaf.reshape(size, batch, leaf.shape[1] // batch, *leaf.shape[2:]), 0, 1)
    return by_prompt.reshape(size * leaf.shape[1], *leaf.shape[2:])


def _split(leaf: Array, size: int, batch: int) -> Array:
    """Return the rows of each call, as ``[size, rows, ...]``: the inverse of `_merged`."""
    per_call = len(leaf) // size
    by_call = jnp.moveaxis(leaf.reshape(batch, size, per_call // batch, *leaf.shape[1:]), 1, 0)
    return by_call.reshape(size, per_call, *leaf.shape[1:])


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
