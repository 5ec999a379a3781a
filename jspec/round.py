"""One round: draft, verify, accept, commit. Every loop in jspec is this round, played until all rows are done."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.accept import Rule, length_of_prefix
from jspec.cache import KVCache, append
from jspec.draft_length import DraftLength, compiled_lengths
from jspec.drafters.base import Context, TargetView, as_draft, is_foreign, outside
from jspec.keys import draft_noise, target_noise
from jspec.probs import at_tokens
from jspec.rows import write_rows
from jspec.sampling import LogitsTransforms, TokenCounts, add_tokens, token_probs
from jspec.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT, Draft, Stats, Verdict, pytree


@pytree
class RequestParams:
    """What stays the same for the whole generation, one entry a row.

    Attributes:
        keys: typed keys ``[B]``.
        prompt_lengths: ``int32[B]``.
        limits: ``int32[B]``, most new tokens.
        eos_ids: ``int32[B, n]``, tokens that end a row; -1 matches none.
        transforms, draft_transforms: the transforms of target and draft.
    """

    keys: Array
    prompt_lengths: Array
    limits: Array
    eos_ids: Array
    transforms: LogitsTransforms
    draft_transforms: LogitsTransforms


@pytree
class State:
    """What the next round needs. Buffers have K + 1 spare slots: a round may write that far past the last limit.

    Attributes:
        tokens: ``int32[B, W]``, prompt and text; valid up to ``lengths[b]``.
        lengths: ``int32[B]``, committed tokens, prompt included.
        done: ``bool[B]``; such a row no longer moves.
        cache: the target's; holds every committed token but the last.
        drafter: the drafter's own state.
        token_counts: what penalties look at, or None.
        draft_length: what a `jspec.draft_length.DraftLength` remembers.
    """

    tokens: Array
    lengths: Array
    done: Array
    cache: KVCache
    drafter: Any
    token_counts: TokenCounts | None
    draft_length: Any


@pytree
class Record:
    """What people want to know afterwards; no round reads it. Shapes as in `jspec.types.Output`, with spare slots.

    Attributes:
        strange: ``bool[B]``, whether a drafter that is not jspec's own has guessed an id outside the vocabulary.
    """

    logprobs: Array
    origins: Array
    stats: Stats
    strange: Array


def play_round(
    target: Any,
    drafter: Any,
    rule: Rule,
    draft_length: DraftLength,
    params: RequestParams,
    state: State,
    record: Record,
) -> tuple[State, Record]:
    """Play one round for all rows; each row that is not done gains 1 to K + 1 tokens."""
    draft, strange, drafter_state = _propose(target, drafter, rule, draft_length, params, state)
    record = dataclasses.replace(record, strange=record.strange | strange & ~state.done)
    with jax.named_scope("verify"):
        hidden, target_probs, cache = _verify(target, draft_length, params, state, draft)
    with jax.named_scope("accept"):
        verdict = rule.accept(params.keys, state.lengths, draft, target_probs)
        if verdict.distortion is None and not rule.exact:  # a lossy rule without a receipt
            verdict = dataclasses.replace(verdict, distortion=jnp.full(target_probs.shape[:2], jnp.nan))
    with jax.named_scope("commit"):
        if drafter is not None:
            drafter_state = drafter.commit(drafter_state, draft, verdict, hidden)
        state = dataclasses.replace(state, cache=cache, drafter=drafter_state)
        return _commit(params, draft_length, state, record, draft, verdict, target_probs)


def _propose(
    target: Any, drafter: Any, rule: Rule, draft_length: DraftLength, params: RequestParams, state: State
) -> tuple[Draft, Array, Any]:
    """The draft of this round, without a drafter one of no tokens; `Record.strange` of it; the drafter's state."""
    batch, vocab_size = state.lengths.size, target.config.vocab_size
    if drafter is None:
        empty = jnp.zeros((batch, 0, vocab_size), jnp.float32)
        return Draft(jnp.zeros((batch, 0), jnp.int32), empty), jnp.zeros(batch, bool), state.drafter
    k = draft_length.max_draft_tokens
    with jax.named_scope("draft"):
        draw = target_noise if rule.shares_noise else draft_noise
        noise = draw(params.keys, state.lengths[:, None] + jnp.arange(k), vocab_size)
        context = Context(state.tokens, state.lengths, noise, params.draft_transforms, state.token_counts,
                          TargetView(target, state.cache, unread=1), vocab_size)  # fmt: skip
        budget = draft_length.budget(state.draft_length, batch)
        if budget is not None:
            budget = jnp.where(state.done, 0, jnp.clip(budget, 0, k))
            context = dataclasses.replace(context, budget=budget, draft_length=draft_length)
        draft, drafter_state = drafter.propose(state.drafter, context, k)
        mended, strange = as_draft(drafter, draft, context, k), jnp.zeros(batch, bool)
        if is_foreign(drafter):  # it costs a look at all laws
            strange = (outside(draft) & (draft.probs.sum(-1) != 0)).any(1)
        return mended, strange, drafter_state


def _verify(
    target: Any, draft_length: DraftLength, params: RequestParams, state: State, draft: Draft
) -> tuple[Array, Array, KVCache]:
    """The target's hidden states and laws over the last token and the draft, K + 1 a row, and its cache."""
    start = state.lengths - 1
    block = jnp.concatenate([jnp.take_along_axis(state.tokens, start[:, None], axis=1), draft.tokens], axis=1)

    def laws(hidden: Array) -> Array:
        drafted = draft.tokens[:, : hidden.shape[1] - 1]
        return token_probs(target.logits(hidden), params.transforms, state.token_counts, drafted)

    lengths = compiled_lengths(draft_length)
    if len(lengths) == 1:
        hidden, cache = target.forward(block, state.cache, start)
        return hidden, laws(hidden), cache

    def up_to(k: int) -> tuple[Array, Array, KVCache]:
        # The cache is only read here, for XLA would copy what one of several branches updates.
        new = target.new_cache(*block.shape)
        hidden, new = target.forward(block[:, : k + 1], new, start, past=(state.cache, start))
        rest = ((0, 0), (0, block.shape[1] - 1 - k), (0, 0))
        return jnp.pad(hidden, rest), jnp.pad(laws(hidden), rest), new

    shortest = jnp.searchsorted(jnp.array(lengths), _num_guessed(draft).max())
    hidden, probs, new = lax.switch(shortest, [functools.partial(up_to, k) for k in lengths])
    return hidden, probs, append(state.cache, new, start)


def _commit(
    params: RequestParams,
    draft_length: DraftLength,
    state: State,
    record: Record,
    draft: Draft,
    verdict: Verdict,
    target_probs: Array,
) -> tuple[State, Record]:
    """Write the accepted tokens and the one after them, up to the end of text and the row's limit."""
    num_accepted, guessed, width = verdict.num_accepted, _num_guessed(draft), draft.tokens.shape[1] + 1
    index, emitted = jnp.arange(width), _emitted(draft, verdict)
    # Where the target's law has no mass (its logits were not finite) there is no next token.
    no_mass = ~(jnp.take_along_axis(target_probs, num_accepted[:, None, None], axis=1).sum((1, 2)) > 0)

    written = state.lengths - params.prompt_lengths
    remaining = params.limits - written
    is_eos = (emitted[:, :, None] == params.eos_ids[:, None, :]).any(-1)
    to_eos = jnp.where(is_eos.any(1), jnp.argmax(is_eos, axis=1).astype(jnp.int32) + 1, width)
    possible = num_accepted + ~no_mass
    count = jnp.where(state.done, 0, jnp.minimum(possible, jnp.minimum(to_eos, remaining)))
    last_is_eos = jnp.take_along_axis(is_eos, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    ended = last_is_eos & (count > 0) | (count == remaining)
    invalid = no_mass & (count == num_accepted) & ~ended & ~state.done

    kept = index < count[:, None]
    log_law = jnp.log(at_tokens(target_probs, emitted))
    distortion = 0.0
    if verdict.distortion is not None:
        distortion = jnp.where(kept, verdict.distortion, 0).sum(1).astype(jnp.float32)
    accepted = jnp.minimum(num_accepted, count)
    refused = (num_accepted < guessed) & (num_accepted < count)  # and its correction is written
    drafted = jnp.minimum(guessed, remaining)
    drafted = jnp.where(to_eos <= accepted, to_eos, drafted)  # an accepted end of text ends the draft with it
    drafted = jnp.where(state.done, 0, drafted)
    record = Record(
        write_rows(record.logprobs, log_law, written),
        write_rows(record.origins, _origins(num_accepted, guessed, width), written),
        _count(record.stats, state.done, drafted, accepted, accepted + refused, invalid, distortion),
        record.strange,
    )
    token_counts = None if state.token_counts is None else add_tokens(state.token_counts, emitted, kept)
    tokens = write_rows(state.tokens, emitted, state.lengths)
    done = state.done | ended | invalid
    lengths = state.lengths + count
    learnt = draft_length.update(state.draft_length, drafted, accepted)
    state = dataclasses.replace(
        state, tokens=tokens, lengths=lengths, done=done, token_counts=token_counts, draft_length=learnt
    )
    return state, record


def _emitted(draft: Draft, verdict: Verdict) -> Array:
    """The accepted drafts, the token after them, then anything, ``int32[B, K + 1]``."""
    padded = jnp.pad(draft.tokens, ((0, 0), (0, 1)))
    follows = jnp.arange(padded.shape[1]) == verdict.num_accepted[:, None]
    return jnp.where(follows, verdict.next_token[:, None], padded)


def _origins(num_accepted: Array, guessed: Array, width: int) -> Array:
    """Where the tokens of `_emitted` come from, ``int8[B, K + 1]``."""
    none = BONUS if width == 1 else NO_DRAFT  # K = 0 is plain decoding, where nothing was to be drafted
    after = jnp.where(num_accepted < guessed, CORRECTED, jnp.where(guessed > 0, BONUS, none))
    return jnp.where(jnp.arange(width) < num_accepted[:, None], ACCEPTED, after[:, None]).astype(jnp.int8)


def _num_guessed(draft: Draft) -> Array:
    """How many tokens of each draft come before one that is no guess, ``int32[B]``."""
    return length_of_prefix(at_tokens(draft.probs, draft.tokens) > 0)


def _count(
    stats: Stats, done: Array, drafted: Array, accepted: Array, judged: Array, invalid: Array, distortion: Array | float
) -> Stats:
    """`stats` after a round in which `accepted` of `drafted` tokens were committed, of which `judged` were judged."""
    index = jnp.arange(stats.accepted_at.shape[1])
    return Stats(
        rounds=stats.rounds + ~done,
        drafted=stats.drafted + drafted,
        accepted=stats.accepted + accepted,
        accepted_at=stats.accepted_at + (index < accepted[:, None]),
        judged_at=stats.judged_at + (index < judged[:, None]),
        invalid=stats.invalid | invalid,
        distortion=stats.distortion + distortion,
    )
