"""Output buffers that every round writes to, and the final result that is cut from them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.row_ops import prefix_mask, slice_rows, write_rows
from jspec.core.types import PADDING, Output, Record, Stats, pytree
from jspec.decoding.recording import empty_record, with_round
from jspec.decoding.state import DecodeState, RoundOutput


@pytree
class OutputBuffers:
    """The output of all rounds so far. Rounds never read it. Shapes are those of `Output` plus K + 1 spare columns.

    Attributes:
        out_of_vocab: ``bool[B]``, whether any round drafted an id outside the vocabulary. See `RoundOutput`.
        record: None unless a record was requested.
        top_ids, top_logprobs: None unless they were requested.
    """

    logprobs: Array
    raw_logprobs: Array
    origins: Array
    stats: Stats
    out_of_vocab: Array
    record: Record | None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


def empty_buffers(
    batch: int, max_new_tokens: int, num_draft_tokens: int, num_recorded: int | None = None, num_top: int = 0
) -> OutputBuffers:
    """Return the buffers before the first round.

    Args:
        num_recorded: the number of draft tokens to record per round, or None.
        num_top: the number of most likely tokens to keep for every new token.
    """
    zeros, no = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    by_depth = jnp.zeros((batch, num_draft_tokens), jnp.int32)
    stats = Stats(zeros, zeros, zeros, by_depth, by_depth, no, jnp.zeros(batch, jnp.float32))
    shape = batch, max_new_tokens + num_draft_tokens + 1
    logprobs = jnp.zeros(shape, jnp.float32)
    record = None if num_recorded is None else empty_record(batch, max_new_tokens, num_recorded)
    buffers = OutputBuffers(logprobs, logprobs, jnp.zeros(shape, jnp.int8), stats, no, record)
    if not num_top:
        return buffers
    top = jnp.zeros((*shape, num_top), jnp.float32)
    return dataclasses.replace(buffers, top_ids=top.astype(jnp.int32), top_logprobs=top)


def collect(buffers: OutputBuffers, new: RoundOutput, written: Array, done: Array) -> OutputBuffers:
    """Add a round to `buffers`. Before the round, row b had ``written[b]`` new tokens, and was done if ``done[b]``."""

    def written_rows(rows: Array | None, new: Array) -> Array | None:
        return None if rows is None else write_rows(rows, new, written)

    record = buffers.record
    if record is not None and new.record is not None:
        record = with_round(record, new.record, buffers.stats.rounds)
    return OutputBuffers(
        write_rows(buffers.logprobs, new.logprobs, written),
        write_rows(buffers.raw_logprobs, new.raw_logprobs, written),
        write_rows(buffers.origins, new.origins, written),
        _add(buffers.stats, new, done),
        buffers.out_of_vocab | new.out_of_vocab,
        record,
        written_rows(buffers.top_ids, new.top_ids),
        written_rows(buffers.top_logprobs, new.top_logprobs),
    )


def _add(stats: Stats, new: RoundOutput, done: Array) -> Stats:
    """Return `stats` updated with a round. Rows that were already done do not count the round."""
    depths = stats.accepted_at.shape[1]
    return Stats(
        rounds=stats.rounds + (~done).astype(jnp.int32),
        drafted=stats.drafted + new.drafted,
        accepted=stats.accepted + new.accepted,
        accepted_at=stats.accepted_at + prefix_mask(new.accepted, depths).astype(jnp.int32),
        judged_at=stats.judged_at + prefix_mask(new.judged, depths).astype(jnp.int32),
        invalid=stats.invalid | new.invalid,
        distortion=stats.distortion + new.distortion,
    )


def cut_to_size(
    state: DecodeState, buffers: OutputBuffers, prompt_lengths: Array, pad_ids: Array, max_new_tokens: int
) -> Output:
    """Extract the new tokens, and pad everything after each row's end."""

    def cut(part: Array) -> Array:
        return part[:, :max_new_tokens]

    def cut_top(part: Array | None) -> Array | None:
        return None if part is None else jnp.where(kept[:, :, None], cut(part), 0)

    new = slice_rows(state.tokens, prompt_lengths, max_new_tokens)
    lengths = state.lengths - prompt_lengths
    kept = prefix_mask(lengths, max_new_tokens)
    return Output(
        tokens=jnp.where(kept, new, pad_ids).astype(jnp.int32),
        lengths=lengths,
        logprobs=jnp.where(kept, buffers.logprobs[:, :max_new_tokens], 0),
        raw_logprobs=jnp.where(kept, buffers.raw_logprobs[:, :max_new_tokens], 0),
        origins=jnp.where(kept, buffers.origins[:, :max_new_tokens], PADDING),
        stats=buffers.stats,
        record=jax.tree.map(cut, buffers.record),
        top_ids=cut_top(buffers.top_ids),
        top_logprobs=cut_top(buffers.top_logprobs),
    )
