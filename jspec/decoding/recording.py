# pyright: strict, reportUnknownMemberType=false
"""All guesses of all rounds, for people to look at: `jspec.core.types.Record` as it grows, where it is asked for."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jspec.acceptance.path import whole_branches
from jspec.core.origins import KEPT, NO_GUESS, REFUSED
from jspec.core.row_ops import prefix_mask, write_rows
from jspec.core.types import Draft, Record, Verdict


def of_round(draft: Draft, verdict: Verdict, accepted: Array, count: Array) -> Record:
    """A record of one round; of a row that gains no token, one of no guesses.

    Args:
        accepted: ``int32[B]``, how many guesses are written.
        count: ``int32[B]``, how many tokens.
    """
    batch, size = draft.tokens.shape
    nodes = jnp.arange(1, size + 1)[None]
    path = jnp.broadcast_to(nodes, (batch, size)) if verdict.path is None else verdict.path
    written = prefix_mask(accepted, path.shape[1])
    kept = ((path[:, :, None] == nodes[:, None]) & written[:, :, None]).any(1)
    guessed = whole_branches(draft) & (count > 0)[:, None]
    fates = jnp.where(kept, KEPT, jnp.where(guessed, REFUSED, NO_GUESS)).astype(jnp.int8)
    parents = jnp.broadcast_to(jnp.asarray(draft.topology.parents, jnp.int32), (batch, size))
    return Record(draft.tokens[:, None], parents[:, None], fates[:, None], count[:, None])


def empty_record(batch: int, rounds: int, size: int) -> Record:
    """Before the first round; with a spare one, which rows that are done write into."""
    shape = batch, rounds + 1, size
    whole = jnp.zeros(shape, jnp.int32)
    return Record(whole, whole, jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:2], jnp.int32))


def with_round(record: Record, new: Record, rounds: Array) -> Record:
    """`record` with one more round behind the ``rounds[B]`` that each row has played."""
    return jax.tree.map(functools.partial(write_rows, start=rounds), record, new)
