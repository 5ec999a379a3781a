"""The optional record of every round's draft tokens, for display: a growing `jspec.core.types.Record`."""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jspec.acceptance.path import whole_branches
from jspec.core.origins import KEPT, NO_GUESS, REFUSED
from jspec.core.row_ops import prefix_mask, write_rows
from jspec.core.types import Draft, Record, Verdict


def of_round(draft: Draft, verdict: Verdict, accepted: Array, count: Array) -> Record:
    """Return one round's record, without the draft tokens of rows that gain no tokens.

    Args:
        accepted: ``int32[B]``, how many draft tokens are committed.
        count: ``int32[B]``, how many tokens are committed.
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
    """Return an empty record, with one spare round, to which finished rows write."""
    shape = batch, rounds + 1, size
    whole = jnp.zeros(shape, jnp.int32)
    return Record(whole, whole, jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:2], jnp.int32))


def with_round(record: Record, new: Record, rounds: Array) -> Record:
    """Add a round to `record`, after the ``rounds[B]`` rounds that each row has run."""
    return jax.tree.map(functools.partial(write_rows, start=rounds), record, new)
