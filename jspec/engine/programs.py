"""An engine's programs. Each program takes and returns the slots, which are donated and written in place."""

import dataclasses
from typing import cast

import jax.numpy as jnp
from jax import Array, lax

from jspec.core.sampling import TokenCounts, add_tokens, count_prompt
from jspec.core.types import PyTree
from jspec.decoding.round import decode_round
from jspec.decoding.state import DecodeState, RequestParams
from jspec.drafters import CascadeDrafter, MixtureDrafter
from jspec.drafters.capabilities import features_of
from jspec.drafters.chunked_prefill import begin, can_read, leaves_of, needs_prefill, prefill_chunk
from jspec.drafters.draft_length import Fixed
from jspec.drafters.signals import NO_SIGNALS, PromptSignals
from jspec.engine.program_inputs import CallLimits, RoundSpec, TextPiece
from jspec.engine.slot_output import Packed, Scores, empty_output, expand_to_slots, pack, set_final_state, set_round
from jspec.engine.slots import AnyDrafter, Slots, gather_rows, get_row, keep_temperature, scatter_rows, select, set_row
from jspec.models.kv_cache import KVCache, copy_slots
from jspec.models.llama import Llama
from jspec.models.logprobs import raw_logprobs, top_logprobs

_BLOCK = 256  # tokens per step when a cache is copied


def assign_slot(
    target: Llama,
    drafter: AnyDrafter | None,
    slots: Slots,
    slot: Array,
    row: RequestParams,
    num_prefix_tokens: Array,
    num_prefilled: Array,
    source: Array,
) -> Slots:
    """Assign a slot to a request, before prefill.

    Args:
        slot: an int.
        row: the request as a batch of one.
        num_prefix_tokens: the number of tokens to prefill for the request.
        num_prefilled: how many of these are already prefilled.
        source: the slot that holds the prefilled tokens. If it is another slot, they are copied.
    """
    state, is_other = slots.state, (source != slot).astype(jnp.int32)
    block = min(_BLOCK, state.tokens.shape[1] - 1)

    def copy_row(_: Array, rows: PyTree) -> PyTree:
        return set_row(rows, get_row(rows, source), slot)

    def copy_block(i: Array, cache: KVCache) -> KVCache:
        return copy_slots(cache, source, slot, i * block, block)

    # Use loops, because after a `cond`, XLA would copy all rows. Copy the whole row of a drafter's state, because its
    # layout is unknown.
    rows = {"tokens": state.tokens, "drafter": state.drafter}
    rows = cast(dict[str, PyTree], lax.fori_loop(0, is_other, copy_row, rows))
    cache = cast(KVCache, lax.fori_loop(0, is_other * -(-num_prefilled // block), copy_block, state.cache))
    state = dataclasses.replace(
        state,
        **rows,
        cache=cache,
        lengths=state.lengths.at[slot].set(num_prefilled + 1),
        done=state.done.at[slot].set(True),
    )
    num_read = jnp.minimum(slots.num_drafter_read[source], num_prefilled)
    return Slots(
        params=set_row(slots.params, row, slot),
        state=state,
        num_prefix_tokens=slots.num_prefix_tokens.at[slot].set(num_prefix_tokens),
        num_drafter_read=slots.num_drafter_read.at[slot].set(num_read),
    )


def prefill(
    target: Llama,
    drafter: AnyDrafter | None,
    slots: Slots,
    slot: Array,
    piece: TextPiece,
    scored: Array | None = None,
    *,
    num_top: int = -1,
) -> tuple[Slots, Scores | None]:
    """Prefill a piece of a request's text. After the last piece, the request begins to decode.

    Args:
        piece: the next piece of the text in `slot`.
        scored: whether to compute scores. If false, the scores are zeros. If None, no scores are returned.
        num_top: the number of most likely tokens that the scores include; -1 for no scores.
    """
    features = features_of(drafter)
    # Select the row within the cache. A copy of the row would cost time in proportion to the slot's length.
    cache = dataclasses.replace(slots.state.cache, rows=slot[None])
    target_features, hidden, cache = _forward(target, features, piece.tokens[:, :-1], cache, piece.start[None])
    slots = _set_cache(slots, dataclasses.replace(cache, rows=None))
    slots = _record_piece(target, drafter, slots, slot, piece, target_features)
    return slots, None if scored is None else _scores(target, hidden, piece.tokens, scored, num_top)


def prefill_batch(
    target: Llama,
    drafter: AnyDrafter | None,
    slots: Slots,
    pieces: Array,
    starts: Array,
    counts: Array,
    chosen: Array,
    num_chosen: Array,
) -> Slots:
    """Prefill pieces of several slots in one pass over all slots.

    The pass also writes into the other slots' KV caches, after the end of their text, where there is room for a piece.

    Args:
        pieces: ``int32[S, C + 1]``, the `tokens` of each slot's `TextPiece`.
        starts, counts: ``int32[S]``, the `start` and `count` of each slot's piece.
        chosen: ``int32[S]``, the slots to prefill, followed by arbitrary slots.
        num_chosen: how many slots to prefill.
    """
    state, features = slots.state, features_of(drafter)
    is_chosen = jnp.zeros(starts.shape, bool).at[chosen].max(jnp.arange(chosen.size) < num_chosen)
    positions = jnp.where(is_chosen, starts, state.lengths - 1)
    target_features, _, cache = _forward(target, features, pieces[:, :-1], state.cache, positions)

    def record(i: Array, slots: Slots) -> Slots:
        slot = chosen[i]
        row = None if target_features is None else get_row(target_features, slot)
        piece = TextPiece(get_row(pieces, slot), starts[slot], counts[slot])
        return _record_piece(target, drafter, slots, slot, piece, row)

    return cast(Slots, lax.fori_loop(0, num_chosen, record, _set_cache(slots, cache)))


def _set_cache(slots: Slots, cache: KVCache) -> Slots:
    return dataclasses.replace(slots, state=dataclasses.replace(slots.state, cache=cache))


def _record_piece(
    target: Llama,
    drafter: AnyDrafter | None,
    slots: Slots,
    slot: Array,
    piece: TextPiece,
    target_features: Array | None,
) -> Slots:
    """Return the slots after the target has read a piece. `target_features` is None if the drafter requests none."""
    state, features = slots.state, features_of(drafter)
    start, count = piece.start, piece.count
    at, end = start[None], start + count + 1
    tokens = lax.dynamic_update_slice(state.tokens, piece.tokens, (slot, start))
    is_prefilled = end == slots.num_prefix_tokens[slot]
    drafter_state = state.drafter
    if drafter is not None:
        row, text = get_row(drafter_state, slot), get_row(tokens, slot)
        if features:
            row = select(start == 0, begin(drafter, target, 1, text.shape[1] - 1), row)
            signals = PromptSignals(target_features, None, target)
            row = prefill_chunk(drafter, row, piece.tokens, at, count[None], signals)
        else:
            row = _begin_row(target, drafter, row, text, end, is_prefilled & (slots.num_drafter_read[slot] == 0))
        drafter_state = set_row(drafter_state, row, slot)
    counts = _count_tokens(get_row(tokens, slot), slots.params.prompt_lengths[slot], end, target.config.vocab_size)
    state = dataclasses.replace(
        state,
        tokens=tokens,
        lengths=state.lengths.at[slot].set(end),
        done=state.done.at[slot].set(~is_prefilled),
        drafter=drafter_state,
        token_counts=set_row(state.token_counts, counts, slot),
    )
    return dataclasses.replace(slots, state=state)


def _scores(target: Llama, hidden: Array, piece: Array, scored: Array, num_top: int) -> Scores:
    """Return the target's scores for all tokens of a piece except the first, or zeros if not `scored`."""

    def compute() -> Scores:
        logits = target.logits(hidden)
        ids, tops = top_logprobs(logits, num_top)
        return Scores(raw_logprobs(logits, piece[:, 1:])[0], ids[0], tops[0])

    def zeros() -> Scores:
        count = piece.shape[1] - 1
        tops = jnp.zeros((count, num_top), jnp.float32)
        return Scores(jnp.zeros(count, jnp.float32), tops.astype(jnp.int32), tops)

    return cast(Scores, lax.cond(scored, compute, zeros))


def _count_tokens(row: Array, prompt_length: Array, length: Array, vocab_size: int) -> TokenCounts:
    """Return the token counts, for penalties, of a text ``int32[1, L]`` with `length` tokens."""
    positions = jnp.arange(row.shape[1])
    is_output = (positions >= prompt_length) & (positions < length)
    return add_tokens(count_prompt(row, jnp.minimum(prompt_length, length)[None], vocab_size), row, is_output[None])


def _forward(
    target: Llama, features: tuple[int, ...], tokens: Array, cache: KVCache, starts: Array
) -> tuple[Array | None, Array, KVCache]:
    """Return the target's features (None if none were requested), its last hidden states, and its KV cache."""
    if features:
        hidden, target_features, cache = target.forward_with_features(tokens, cache, starts, features)
        return target_features, hidden, cache
    return None, *target.forward(tokens, cache, starts)


def _begin_row(target: Llama, drafter: AnyDrafter, row: PyTree, text: Array, length: Array, is_new: Array) -> PyTree:
    """Return `row`, one row's drafter state, or a new state if `is_new`.

    A new state has read nothing yet, or, for a drafter that can only read whole texts, it has read the whole text.
    During the row's prefill, rounds ran for other rows, and these rounds used this row's key as well. What they left in
    the row's state must not influence its drafts, because the row's own first round uses the same noise.
    """
    positions = text.shape[1] - 1
    if can_read(drafter):
        return select(is_new, begin(drafter, target, 1, positions), row)

    def create() -> PyTree:
        return drafter.init(jnp.where(jnp.arange(positions) < length, text[:, :-1], 0), positions, NO_SIGNALS)

    def keep() -> PyTree:
        return row

    return cast(PyTree, lax.cond(is_new, create, keep))


def catch_up_drafter(
    target: Llama, drafter: AnyDrafter | None, slots: Slots, slot: Array, num_pieces: Array, *, chunk: int
) -> Slots:
    """Let a drafter read the next `num_pieces` pieces of a slot's text, `chunk` tokens each, up to its end."""
    state, positions = slots.state, slots.state.tokens.shape[1] - 1

    def read_piece(_: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        num_read, row = carry
        start = jnp.minimum(num_read, positions - chunk)
        count = jnp.clip(state.lengths[slot] - 1 - start, 0, chunk)
        piece = lax.dynamic_slice(state.tokens, (slot, start), (1, chunk + 1))
        return start + count, prefill_chunk(cast(AnyDrafter, drafter), row, piece, start[None], count[None], NO_SIGNALS)

    initial = slots.num_drafter_read[slot], get_row(state.drafter, slot)
    num_read, row = cast(tuple[Array, PyTree], lax.fori_loop(0, num_pieces, read_piece, initial))
    state = dataclasses.replace(state, drafter=set_row(state.drafter, row, slot))
    return dataclasses.replace(slots, state=state, num_drafter_read=slots.num_drafter_read.at[slot].set(num_read))


def reads_separately(drafter: AnyDrafter | None) -> bool:
    """Return whether a drafter reads text by itself, and may lag behind. Other drafters read when the target reads."""
    return drafter is not None and not features_of(drafter) and can_read(drafter) and needs_prefill(drafter)


def reads_own_drafts(drafter: AnyDrafter | None) -> bool:
    """Return whether a drafter is a single drafter, or combines two parts that have both read its drafts."""
    count = 0 if drafter is None else len(list(leaves_of(drafter)))
    return count == 1 or (count == 2 and isinstance(drafter, MixtureDrafter | CascadeDrafter))


def max_unread(drafter: AnyDrafter | None, num_draft_tokens: int, constrained: bool) -> int:
    """Return the largest number of unread tokens with which a drafter may draft. It reads these tokens first.

    In a combined drafter, one part may not have read the tokens that a round gained from another part. A `constrained`
    call commits forced tokens, which the drafter has not read.
    """
    return 2 if reads_own_drafts(drafter) and not constrained else num_draft_tokens + 1


def decode_rounds(
    target: Llama,
    drafter: AnyDrafter | None,
    slots: Slots,
    limits: CallLimits,
    rows: Array | None = None,
    *,
    spec: RoundSpec,
) -> tuple[Slots, Packed]:
    """Run up to `limits.rounds` rounds. Stop early once every row is done.

    Args:
        limits: the limits of this call. See `CallLimits`.
        rows: ``int32[B]``, the rows that the call may run or stop, without duplicates; None for all rows.
        spec: the static settings of the rounds. See `RoundSpec`.
    """
    if rows is None:
        return _decode_rounds(target, drafter, slots, limits, spec)
    batch = gather_rows(slots, rows)
    limits = CallLimits(limits.stop[rows], limits.rounds, limits.stop_when_done[rows])
    batch, packed = _decode_rounds(target, drafter, batch, limits, spec)
    updated = batch.state, batch.num_drafter_read
    state, num_read = scatter_rows((slots.state, slots.num_drafter_read), updated, rows)
    slots = dataclasses.replace(slots, state=state, num_drafter_read=num_read)
    return slots, expand_to_slots(packed, rows, num_read.size)


def _decode_rounds(
    target: Llama, drafter: AnyDrafter | None, slots: Slots, limits: CallLimits, spec: RoundSpec
) -> tuple[Slots, Packed]:
    """Run `decode_rounds` for all rows."""
    k, num_top, is_separate = spec.num_draft_tokens, spec.num_top, reads_separately(drafter)
    drafts_or_reads = drafter if k or features_of(drafter) else None
    params, counts = slots.params, slots.state.token_counts
    if spec.temperature_only:
        params, counts = keep_temperature(params), None
    is_idle = slots.state.done | limits.stop
    state = dataclasses.replace(slots.state, done=is_idle, token_counts=counts)
    most_unread = max_unread(drafter, k, constrained=spec.constrain is not None)
    reads_drafts = reads_own_drafts(drafter) and spec.constrain is None

    def body(carry: tuple[Array, DecodeState, Array, Packed]) -> tuple[Array, DecodeState, Array, Packed]:
        i, state, num_read, packed = carry
        can_draft = state.lengths - num_read <= most_unread
        before = dataclasses.replace(state, drafts=can_draft if is_separate and k else None)
        after, output = decode_round(
            target, drafts_or_reads, spec.rule, Fixed(k), params, before, num_top, spec.constrain
        )
        if is_separate and k:
            now = after.lengths - 2 if reads_drafts else state.lengths
            num_read = jnp.where(can_draft & ~state.done, jnp.maximum(num_read, now), num_read)
        return i + 1, dataclasses.replace(after, drafts=None), num_read, set_round(packed, i, pack(output))

    def is_unfinished(carry: tuple[Array, DecodeState, Array, Packed]) -> Array:
        i, done = carry[0], carry[1].done
        return (i < limits.rounds) & ~jnp.all(done) & ((i == 0) | ~jnp.any(done & limits.stop_when_done))

    empty = empty_output(spec.max_rounds, is_idle.size, k, num_top)
    initial = jnp.zeros((), jnp.int32), state, slots.num_drafter_read, empty
    _, state, num_read, packed = lax.while_loop(is_unfinished, body, initial)
    counts = slots.state.token_counts if spec.temperature_only else state.token_counts
    state = dataclasses.replace(state, token_counts=counts)
    slots = dataclasses.replace(slots, state=state, num_drafter_read=num_read)
    num_unread = state.lengths - num_read if is_separate else jnp.zeros_like(num_read)
    return slots, set_final_state(packed, state.done, num_unread)
