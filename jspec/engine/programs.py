# pyright: strict, reportUnknownMemberType=false
"""The programs of an engine. Each takes the slots and gives them back: they are donated, and written in place."""

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

_BLOCK = 256  # tokens, by which caches are copied


def seat(
    target: Any, drafter: Any, slots: Slots, slot: Array, row: RequestParams, given: Array, kept: Array, source: Array
) -> Slots:
    """Give a slot to a request; its text is to be read.

    Args:
        slot: an int.
        row: the request, a batch of one.
        given: how many tokens it comes with.
        kept: how many of them have been read already.
        source: the slot that holds these; if it is another one, they are copied.
    """
    state, is_other = slots.state, (source != slot).astype(jnp.int32)
    block = min(_BLOCK, state.tokens.shape[1] - 1)

    def copied(_: Array, held: Any) -> Any:
        return put(held, take(held, source), slot)

    def copied_block(i: Array, cache: Any) -> Any:
        return copy_slots(cache, source, slot, i * block, block)

    # Loops, for behind a `cond` XLA would copy all rows. Of a drafter nobody knows where what lies.
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
    """Read a piece of a text that was given; with the last of it the request begins to write.

    Args:
        piece: ``int32[1, C + 1]``, tokens from position `start` on and the one behind them, then anything.
        start: no more than has been read, and T - C.
        count: how many tokens to read, in 0 .. C; not the text's last one, which the first round reads.
        scored: whether to tell scores; without, of a program that tells some, they are zeros.
        num_top: of how many of the likeliest tokens to tell in the scores; -1 for no scores.
    """
    features = features_of(drafter)
    told, hidden, row = _read(target, features, piece[:, :-1], take(slots.state.cache, slot), start[None])
    cache = put(slots.state.cache, row, slot)
    slots = _with_read(target, drafter, _with_cache(slots, cache), slot, piece, start, count, told)
    return slots, None if scored is None else _scores(target, hidden, piece, scored, num_top)


def read_several(
    target: Any, drafter: Any, slots: Slots, pieces: Array, starts: Array, counts: Array, which: Array, number: Array
) -> Slots:
    """`read` of several slots in one pass over all of them.

    What becomes of the others' caches lies behind their texts, where there is room for a piece.

    Args:
        pieces: ``int32[S, C + 1]``, as there, of each slot.
        starts, counts: ``int32[S]``, the same.
        which: ``int32[S]``, the slots that are read, first.
        number: how many those are.
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
    """The slots after the target has read a piece; its states were `told`, if the drafter asks for them."""
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
    """What the target made of a piece behind its first token, if it is to be told."""

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
    """What penalties look at in a text ``int32[1, L]`` of so many tokens."""
    places = jnp.arange(row.shape[1])
    written = (places >= prompt_length) & (places < length)
    return add_tokens(count_prompt(row, jnp.minimum(prompt_length, length)[None], vocab_size), row, written[None])


def _read(target: Any, features: Any, tokens: Array, row: Any, at: Array) -> tuple[Any, Array, Any]:
    """The target's states that were asked for, of a model without any None, its last ones, and its cache."""
    if features:
        hidden, told, row = target.forward_with_features(tokens, row, at, features)
        return told, hidden, row
    return None, *target.forward(tokens, row, at)


def _begun(target: Any, drafter: Any, mine: Any, text: Array, length: Array, anew: Array) -> Any:
    """The state ``mine``, of one row, or one that has read nothing yet; of a drafter that reads whole texts, all of it.

    While a row was still reading rounds were played for others, with its key, and what those left in its state must not
    choose what is drafted: the same noise decides in the first round of its own.
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
    """One pytree, or another."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(chosen, a, b)

    return jax.tree.map(pick, one, other)


def follow(target: Any, drafter: Any, slots: Slots, slot: Array, pieces: Array, *, chunk: int) -> Slots:
    """Let a drafter that `lags` read the next `pieces` of `chunk` tokens of a slot's text, as far as it goes."""
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
    """Whether a drafter reads texts by itself, so that it may be behind; others know what the target has read."""
    return drafter is not None and not features_of(drafter) and can_read(drafter) and not keeps_nothing(drafter)


def is_alone(drafter: Any) -> bool:
    """Whether it is no combination of several, or one of which both have read what it has drafted."""
    count = 0 if drafter is None else len(list(leaves_of(drafter)))
    return count == 1 or (count == 2 and isinstance(drafter, MixtureDrafter | CascadeDrafter))


def tolerated_lag(drafter: Any, num_draft_tokens: int) -> int:
    """By how many tokens a drafter may be behind that is asked for a draft: it reads those before it drafts.

    Of several drafters one may not have read what a round has brought by another.
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
    """Play up to `rounds` rounds, until no row is left that moves.

    Args:
        stop: ``bool[S]``, rows that are to end where they are.
        rounds: an int up to `most`.
        yields: ``bool[S]``, rows for whose slots somebody waits: no round is played behind one that finds one ended.
        rows: ``int32[B]``, different, the only ones that are played, and stopped; None for all.
        rule, num_draft_tokens: of every round.
        is_lean: leave everything beside temperature out; no row that moves may ask for more.
        num_top: how many of the likeliest tokens to look for, where a row asks for some.
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
    """`play` of all rows."""
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
