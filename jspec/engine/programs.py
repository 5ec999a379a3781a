# pyright: strict, reportUnknownMemberType=false
"""An engine's programs. Each takes the slots and returns them; the slots are donated, and written in place."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance.base import Rule
from jspec.core.sampling import TokenCounts, add_tokens, count_prompt, raw_logprobs, top_logprobs
from jspec.decoding.round import Allowed, play_round
from jspec.decoding.state import DecodeState, RequestParams
from jspec.drafters import CascadeDrafter, MixtureDrafter
from jspec.drafters.capabilities import features_of
from jspec.drafters.draft_length import Fixed
from jspec.drafters.late_reading import begin, can_read, keeps_nothing, leaves_of, read_on
from jspec.engine.slot_output import Packed, Scores, concluded, empty, of_all, pack, with_round
from jspec.engine.slots import Slots, lean, put, some, take, with_some
from jspec.models.kv_cache import copy_slots

_BLOCK = 256  # tokens per step when a cache is copied


def seat(
    target: Any, drafter: Any, slots: Slots, slot: Array, row: RequestParams, given: Array, kept: Array, source: Array
) -> Slots:
    """Assign a slot to a request, before prefill.

    Args:
        slot: an int.
        row: the request as a batch of one.
        given: the number of tokens that the request brings.
        kept: how many of these are already prefilled.
        source: the slot that holds the prefilled tokens. If it is another slot, they are copied.
    """
    state, is_other = slots.state, (source != slot).astype(jnp.int32)
    block = min(_BLOCK, state.tokens.shape[1] - 1)

    def copied(_: Array, held: Any) -> Any:
        return put(held, take(held, source), slot)

    def copied_block(i: Array, cache: Any) -> Any:
        return copy_slots(cache, source, slot, i * block, block)

    # Loops, because after a `cond` XLA would copy all rows. A drafter's state has an unknown layout: copy it whole.
    held = {"tokens": state.tokens, "drafter": state.drafter}
    held = cast(dict[str, Any], lax.fori_loop(0, is_other, copied, held))
    cache = cast(Any, lax.fori_loop(0, is_other * -(-kept // block), copied_block, state.cache))
    state = dataclasses.replace(
        state,
        **held,
        cache=cache,
        lengths=state.lengths.at[slot].set(kept + 1),
        done=state.done.at[slot].set(True),
    )
    known = jnp.minimum(slots.read[source], kept)
    return Slots(put(slots.params, row, slot), state, slots.given.at[slot].set(given), slots.read.at[slot].set(known))


def read(
    target: Any,
    drafter: Any,
    slots: Slots,
    slot: Array,
    piece: Array,
    start: Array,
    count: Array,
    scored: Array | None = None,
    *,
    num_top: int = -1,
) -> tuple[Slots, Scores | None]:
    """Prefill a piece of a request's text. After the last piece, the request begins to decode.

    Args:
        piece: ``int32[1, C + 1]``, the tokens from position `start` on and the one after them, then any values.
        start: at most the number of prefilled tokens, and at most T - C.
        count: how many tokens to prefill, in 0 .. C. This excludes the text's last token, which the first round reads.
        scored: whether to compute scores. If false, a program with scores returns zeros. None for no scores.
        num_top: the number of most likely tokens that the scores include; -1 for no scores.
    """
    features = features_of(drafter)
    told, hidden, row = _read(target, features, piece[:, :-1], take(slots.state.cache, slot), start[None])
    cache = put(slots.state.cache, row, slot)
    slots = _with_read(target, drafter, _with_cache(slots, cache), slot, piece, start, count, told)
    return slots, None if scored is None else _scores(target, hidden, piece, scored, num_top)


def read_several(
    target: Any, drafter: Any, slots: Slots, pieces: Array, starts: Array, counts: Array, which: Array, number: Array
) -> Slots:
    """Prefill pieces of several slots in one pass over all slots.

    The pass also writes into the other slots' KV caches, after the end of their text, where there is room for a piece.

    Args:
        pieces: ``int32[S, C + 1]``, the `piece` of each slot, as in `read`.
        starts, counts: ``int32[S]``, the `start` and `count` of each slot, as in `read`.
        which: ``int32[S]``, the slots to prefill, followed by any slots.
        number: how many slots to prefill.
    """
    state, features = slots.state, features_of(drafter)
    reads = jnp.zeros(starts.shape, bool).at[which].max(jnp.arange(which.size) < number)
    at = jnp.where(reads, starts, state.lengths - 1)
    told, _, cache = _read(target, features, pieces[:, :-1], state.cache, at)

    def one(i: Array, slots: Slots) -> Slots:
        slot = which[i]
        its = None if told is None else take(told, slot)
        return _with_read(target, drafter, slots, slot, take(pieces, slot), starts[slot], counts[slot], its)

    return cast(Slots, lax.fori_loop(0, number, one, _with_cache(slots, cache)))


def _with_cache(slots: Slots, cache: Any) -> Slots:
    return dataclasses.replace(slots, state=dataclasses.replace(slots.state, cache=cache))


def _with_read(
    target: Any, drafter: Any, slots: Slots, slot: Array, piece: Array, start: Array, count: Array, told: Any
) -> Slots:
    """Return the slots after the target has read a piece. `told`: the target's features, if the drafter needs them."""
    state, features = slots.state, features_of(drafter)
    at, end = start[None], start + count + 1
    tokens = lax.dynamic_update_slice(state.tokens, piece, (slot, start))
    begins = end == slots.given[slot]
    drafter_state = state.drafter
    if drafter is not None:
        mine, text = take(drafter_state, slot), take(tokens, slot)
        if features:
            mine = _where(start == 0, begin(drafter, target, 1, text.shape[1] - 1), mine)
            mine = read_on(drafter, mine, piece, at, count[None], features=told, target=target)
        else:
            mine = _begun(target, drafter, mine, text, end, begins & (slots.read[slot] == 0))
        drafter_state = put(drafter_state, mine, slot)
    counts = _counted(take(tokens, slot), slots.params.prompt_lengths[slot], end, target.config.vocab_size)
    state = dataclasses.replace(
        state,
        tokens=tokens,
        lengths=state.lengths.at[slot].set(end),
        done=state.done.at[slot].set(~begins),
        drafter=drafter_state,
        token_counts=put(state.token_counts, counts, slot),
    )
    return dataclasses.replace(slots, state=state)


def _scores(target: Any, hidden: Array, piece: Array, scored: Array, num_top: int) -> Scores:
    """Return the target's scores for all tokens of a piece except the first; zeros if not `scored`."""

    def told() -> Scores:
        logits = target.logits(hidden)
        ids, tops = top_logprobs(logits, num_top)
        return Scores(raw_logprobs(logits, piece[:, 1:])[0], ids[0], tops[0])

    def nothing() -> Scores:
        count = piece.shape[1] - 1
        tops = jnp.zeros((count, num_top), jnp.float32)
        return Scores(jnp.zeros(count, jnp.float32), tops.astype(jnp.int32), tops)

    return cast(Scores, lax.cond(scored, told, nothing))


def _counted(row: Array, prompt_length: Array, length: Array, vocab_size: int) -> TokenCounts:
    """Return the token counts, for penalties, of a text ``int32[1, L]`` with `length` tokens."""
    places = jnp.arange(row.shape[1])
    written = (places >= prompt_length) & (places < length)
    return add_tokens(count_prompt(row, jnp.minimum(prompt_length, length)[None], vocab_size), row, written[None])


def _read(target: Any, features: Any, tokens: Array, row: Any, at: Array) -> tuple[Any, Array, Any]:
    """Return the target's features (None if none were requested), its last hidden states, and its KV cache."""
    if features:
        hidden, told, row = target.forward_with_features(tokens, row, at, features)
        return told, hidden, row
    return None, *target.forward(tokens, row, at)


def _begun(target: Any, drafter: Any, mine: Any, text: Array, length: Array, anew: Array) -> Any:
    """Return one row's drafter state ``mine``, or a new state if `anew`.

    A new state has read nothing yet. For a drafter that can only read whole texts, it has read all of the text. During
    the row's prefill, rounds ran for other rows, and these rounds used this row's key as well. What they left in the
    row's state must not influence its drafts, because the row's own first round uses the same noise.
    """
    positions = text.shape[1] - 1
    if can_read(drafter):
        return _where(anew, begin(drafter, target, 1, positions), mine)

    def whole() -> Any:
        return drafter.init(jnp.where(jnp.arange(positions) < length, text[:, :-1], 0), positions)

    def kept() -> Any:
        return mine

    return cast(Any, lax.cond(anew, whole, kept))


def _where(chosen: Array, one: Any, other: Any) -> Any:
    """Select one of two pytrees by a scalar predicate."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(chosen, a, b)

    return jax.tree.map(pick, one, other)


def follow(target: Any, drafter: Any, slots: Slots, slot: Array, pieces: Array, *, chunk: int) -> Slots:
    """Let a drafter that `lags` read the next `pieces` pieces of a slot's text, `chunk` tokens each, up to its end."""
    state, positions = slots.state, slots.state.tokens.shape[1] - 1

    def read_one(_: Array, loop: tuple[Array, Any]) -> tuple[Array, Any]:
        known, mine = loop
        start = jnp.minimum(known, positions - chunk)
        count = jnp.clip(state.lengths[slot] - 1 - start, 0, chunk)
        piece = lax.dynamic_slice(state.tokens, (slot, start), (1, chunk + 1))
        return start + count, read_on(drafter, mine, piece, start[None], count[None])

    unread = slots.read[slot], take(state.drafter, slot)
    known, mine = cast(tuple[Array, Any], lax.fori_loop(0, pieces, read_one, unread))
    state = dataclasses.replace(state, drafter=put(state.drafter, mine, slot))
    return dataclasses.replace(slots, state=state, read=slots.read.at[slot].set(known))


def lags(drafter: Any) -> bool:
    """Return whether a drafter reads text by itself, and may therefore lag. Others know what the target has read."""
    return drafter is not None and not features_of(drafter) and can_read(drafter) and not keeps_nothing(drafter)


def is_alone(drafter: Any) -> bool:
    """Return whether a drafter is a single one, or combines two drafters that have both read what it has drafted."""
    count = 0 if drafter is None else len(list(leaves_of(drafter)))
    return count == 1 or (count == 2 and isinstance(drafter, MixtureDrafter | CascadeDrafter))


def tolerated_lag(drafter: Any, num_draft_tokens: int) -> int:
    """Return the number of tokens by which a drafter may lag and still draft. It reads these tokens first.

    In a combination, one drafter may not have read the tokens that a round gained from another.
    """
    return 2 if is_alone(drafter) else num_draft_tokens + 1


def play(
    target: Any,
    drafter: Any,
    slots: Slots,
    stop: Array,
    rounds: Array,
    yields: Array,
    rows: Array | None = None,
    **how: Any,
) -> tuple[Slots, Packed]:
    """Run up to `rounds` rounds. Stop early once every row is done.

    Args:
        stop: ``bool[S]``, rows to stop before the first round.
        rounds: an int up to `most`.
        yields: ``bool[S]``, rows whose slots other requests are waiting for. No rounds run after one of them ends.
        rows: ``int32[B]``, the only rows to run and to stop, without duplicates; None for all.
        rule, num_draft_tokens: the acceptance rule and the draft length of every round.
        is_lean: whether to omit all sampling parameters except temperature. No active row may need others.
        num_top: the number of most likely tokens to find, if a row requests any.
        constrain: as for `jspec.decoding.round.play_round`.
    """
    if rows is None:
        return _play(target, drafter, slots, stop, rounds, yields, **how)
    batch, packed = _play(target, drafter, some(slots, rows), stop[rows], rounds, yields[rows], **how)
    state, known = with_some((slots.state, slots.read), (batch.state, batch.read), rows)
    return dataclasses.replace(slots, state=state, read=known), of_all(packed, rows, slots.read.size)


def _play(
    target: Any,
    drafter: Any,
    slots: Slots,
    stop: Array,
    rounds: Array,
    yields: Array,
    *,
    rule: Rule,
    num_draft_tokens: int,
    most: int,
    is_lean: bool,
    num_top: int = 0,
    constrain: Allowed | None = None,
) -> tuple[Slots, Packed]:
    """Run `play` for all rows."""
    k, behind = num_draft_tokens, lags(drafter)
    drafts_or_reads = drafter if k or features_of(drafter) else None
    params, counts = slots.params, slots.state.token_counts
    if is_lean:
        transforms = lean(params.transforms), lean(params.draft_transforms)
        params, counts = dataclasses.replace(params, transforms=transforms[0], draft_transforms=transforms[1],
                                             min_tokens=None, top_logprobs=None, constraints=None), None  # fmt: skip
    idle = slots.state.done | stop
    state = dataclasses.replace(slots.state, done=idle, token_counts=counts)
    tolerated, alone = tolerated_lag(drafter, k), is_alone(drafter)

    def body(loop: tuple[Array, DecodeState, Array, Packed]) -> tuple[Array, DecodeState, Array, Packed]:
        i, state, known, packed = loop
        ready = state.lengths - known <= tolerated
        before = dataclasses.replace(state, drafts=ready if behind and k else None)
        after, new = play_round(target, drafts_or_reads, rule, Fixed(k), params, before, num_top, constrain)
        if behind and k:
            now = after.lengths - 2 if alone else state.lengths
            known = jnp.where(ready & ~state.done, jnp.maximum(known, now), known)
        return i + 1, dataclasses.replace(after, drafts=None), known, with_round(packed, i, pack(new))

    def unfinished(loop: tuple[Array, DecodeState, Array, Packed]) -> Array:
        i, done = loop[0], loop[1].done
        return (i < rounds) & ~jnp.all(done) & ((i == 0) | ~jnp.any(done & yields))

    begun = jnp.zeros((), jnp.int32), state, slots.read, empty(most, slots.read.size, k, num_top)
    _, state, known, packed = lax.while_loop(unfinished, body, begun)
    state = dataclasses.replace(state, token_counts=slots.state.token_counts if is_lean else state.token_counts)
    slots = dataclasses.replace(slots, state=state, read=known)
    return slots, concluded(packed, state.done, state.lengths - known if behind else jnp.zeros_like(known))
