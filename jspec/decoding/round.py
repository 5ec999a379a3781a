"""One round: draft, verify, accept, commit. Every loop in jspec runs this round until all rows are done."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypedDict, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance import RULES
from jspec.acceptance.base import Rule
from jspec.acceptance.path import Path, along_path, at_path
from jspec.acceptance.walk import AnyTree
from jspec.core.keys import draft_noise, positions_from, target_noise
from jspec.core.probs import at_tokens
from jspec.core.row_ops import prefix_mask, write_rows
from jspec.core.sampling import add_tokens
from jspec.core.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT, Draft, PyTree, Verdict, passed
from jspec.decoding.recording import of_round
from jspec.decoding.state import DecodeState, RequestParams, RoundOutput
from jspec.decoding.verify import TargetOutput, last_token, verify
from jspec.drafters.base import Context, Drafter, TargetView, is_user_defined, kind_of, tree_of
from jspec.drafters.capabilities import embeddings_of, features_of, num_top_tokens_of
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.draft_length import DraftLength
from jspec.drafters.drafts import as_draft, is_out_of_vocab, mask_draft
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.models.kv_cache import keep
from jspec.models.llama import Llama
from jspec.models.logprobs import raw_logprobs, top_logprobs

Constrain = Callable[[RequestParams, DecodeState, Draft], tuple[Draft, Array]]


def decode_round(
    target: Llama,
    drafter: Drafter[PyTree] | None,
    rule: Rule,
    draft_length: DraftLength,
    params: RequestParams,
    state: DecodeState,
    num_top: int = 0,
    constrain: Constrain | None = None,
) -> tuple[DecodeState, RoundOutput]:
    """Run one round for all rows. Each row that is not done gains 1 to K + 1 tokens.

    If K is 0, the drafter only reads, so that it can draft in a later round. Omit a drafter that has nothing to read.
    If a row requests top log-probabilities, the output has the `num_top` most likely tokens of every distribution.
    `constrain` returns the draft, possibly with replaced tokens, and the tokens allowed at every position,
    ``bool[B, N + 1, V]``.
    """
    replaces = constrain is not None
    draft, out_of_vocab, drafter_state = _propose(target, drafter, rule, draft_length, params, state, replaces)
    with jax.named_scope("verify"):
        embeddings = embeddings_of(drafter)
        allowed = _allowed(params, state, draft, target.config.vocab_size)
        if constrain is not None:
            draft, constrained = constrain(params, state, draft)
            allowed = constrained if allowed is None else constrained & allowed
        read, cache = verify(target, draft_length, params, state, draft, features_of(drafter), embeddings, allowed)
        if embeddings is not None:  # the pass has read all ids; later steps accept vocabulary ids only
            draft = mask_draft(draft, ~is_out_of_vocab(draft.tokens, target.config.vocab_size))
    with jax.named_scope("accept"):
        verdict = _by_row(rule, params, state, draft, read.probs)
        if verdict.path is None and not draft.topology.is_chain:
            raise TypeError(
                f"{type(passed(rule)).__name__} verified a tree, but its Verdict has no path; return the accepted "
                "nodes, or set branches to False."
            )
        if verdict.distortion is None and not rule.exact:  # a lossy rule that reports no distortion
            verdict = dataclasses.replace(verdict, distortion=jnp.full(read.probs.shape[:2], jnp.nan))
    with jax.named_scope("commit"):
        path = along_path(draft, verdict, read.probs)
        stop = _stop(params, state, verdict.num_accepted, path)
        if drafter is not None and draft_length.max_draft_tokens:
            committed = _committed(verdict, path, stop)
            drafter_state = drafter.commit(drafter_state, draft, committed, _target_signals(target, drafter, read))
        elif drafter is not None:  # the drafter only reads in this round
            block = jnp.stack([last_token(state), verdict.next_token], axis=1)
            start, count = state.lengths - 1, (~state.done).astype(jnp.int32)
            signals = PromptSignals(read.features, None, target) if features_of(drafter) else NO_SIGNALS
            drafter_state = prefill_chunk(drafter, drafter_state, block, start, count, signals)
        if verdict.path is not None:
            cache = keep(cache, state.lengths - 1, verdict.path)
        logits = at_path(read.logits, verdict)
        top_ids, top = _top(params, state, logits, num_top)
        extra = _Extra(
            raw_logprobs=raw_logprobs(logits, path.tokens),
            top_ids=top_ids,
            top_logprobs=top,
            out_of_vocab=out_of_vocab,
        )
        new = _output(state, verdict, path, stop, extra)
        new = dataclasses.replace(new, record=of_round(draft, verdict, new.accepted, new.count))
        done = state.done | stop.ended | new.invalid
        state = dataclasses.replace(state, cache=cache, drafter=drafter_state, done=done)
        return _commit(draft_length, state, new), new


def _allowed(params: RequestParams, state: DecodeState, draft: Draft, vocab_size: int) -> Array | None:
    """Return the allowed tokens, ``bool[B, N + 1, V]``, with EOS masked before `min_tokens`; None for all tokens."""
    if params.min_tokens is None:
        return None
    new = (state.lengths - params.prompt_lengths)[:, None] + jnp.atleast_2d(jnp.asarray(draft.topology.offsets))
    ends = (params.eos_ids[:, :, None] == jnp.arange(vocab_size)[None, None]).any(1)
    return (new >= params.min_tokens[:, None])[:, :, None] | ~ends[:, None]


def _propose(
    target: Llama,
    drafter: Drafter[PyTree] | None,
    rule: Rule,
    draft_length: DraftLength,
    params: RequestParams,
    state: DecodeState,
    replaces: bool,
) -> tuple[Draft, Array, PyTree]:
    """Return the draft (empty without a drafter), its `RoundOutput.out_of_vocab`, and the drafter's state.

    If `replaces` is true, draft tokens may be replaced. The drafter may then have read none of a round's new tokens.
    """
    batch, vocab_size = state.lengths.size, target.config.vocab_size
    if drafter is None or not draft_length.max_draft_tokens:
        empty = jnp.zeros((batch, 0, vocab_size), jnp.float32)
        return Draft(jnp.zeros((batch, 0), jnp.int32), empty), jnp.zeros(batch, bool), state.drafter
    k = draft_length.max_draft_tokens
    with jax.named_scope("draft"):
        noise = _noise(rule, params, positions_from(state.lengths, k), vocab_size, tree_of(drafter, k))
        context = Context(
            state.tokens,
            state.lengths,
            noise,
            params.draft_transforms,
            state.token_counts,
            TargetView(target, state.cache, unread=1),
            vocab_size,
            unread=k + 1 if replaces else 2,
        )
        budget = draft_length.budget(state.draft_length, batch)
        if budget is None and draft_length.needs_estimates:
            budget = k
        if budget is not None:
            budget = jnp.where(state.done, 0, jnp.clip(budget, 0, k))
            context = dataclasses.replace(
                context, budget=budget, draft_length=draft_length, length_state=state.draft_length
            )
        draft, drafter_state = drafter.propose(state.drafter, context, k)
        mended, out_of_vocab = as_draft(drafter, draft, context, k), jnp.zeros(batch, bool)
        if mended.probs is None and not rule.shares_noise:
            raise ValueError(
                f"{kind_of(drafter)} drafts tokens without distributions, which {type(passed(rule)).__name__} needs "
                'to verify them; use accept="coupled".'
            )
        if is_user_defined(drafter):  # this check reads all distributions
            guessed = draft.probs.sum(-1) != 0 if draft.valid is None else draft.valid
            out_of_vocab = (is_out_of_vocab(draft.tokens, vocab_size) & guessed).any(1) & ~state.done
        if state.drafts is not None:
            mended = mask_draft(mended, state.drafts[:, None], mended.tokens)
        return mended, out_of_vocab, drafter_state


def _target_signals(target: Llama, drafter: Drafter[PyTree], read: TargetOutput) -> TargetSignals:
    """Return the parts of the target's output over the draft that the drafter requests."""
    top_tokens = None
    if count := num_top_tokens_of(drafter):
        top_tokens = lax.top_k(read.logits, min(count, read.logits.shape[-1]))[1]
    if features_of(drafter):
        return TargetSignals(read.hidden, read.features, top_tokens, target)
    return TargetSignals(read.hidden, top_tokens=top_tokens)


def _noise(rule: Rule, params: RequestParams, positions: Array, vocab_size: int, tree: AnyTree) -> Array:
    """Return the noise for drafting, ``float32[B, K, C, 2, W]``.

    Each node has independent noise, unless the rule shares the target's noise or the row is coupled. In those cases,
    all nodes at one depth use the target's noise for that position.
    """
    own = None if rule.shares_noise else draft_noise(params.keys, positions, vocab_size, tree.max_width)
    coupled = params.coupled
    if own is not None and coupled is None:
        return own
    noise = target_noise(params.keys, positions, vocab_size)[:, :, None]
    noise = jnp.broadcast_to(noise, (*noise.shape[:2], tree.max_width, *noise.shape[3:]))
    return noise if own is None or coupled is None else _where_rows(coupled, noise, own)


def _by_row(rule: Rule, params: RequestParams, state: DecodeState, draft: Draft, target_probs: Array) -> Verdict:
    """Return the verdict of `rule`, or of the rule "coupled" in rows that are `coupled`."""

    def by(rule: Rule) -> Verdict:
        return rule.accept(params.keys, state.lengths, draft, target_probs)

    coupled = params.coupled
    if coupled is None:
        return by(rule)

    def own() -> Verdict:
        return by(rule)

    def both() -> Verdict:
        verdict, other = by(rule), by(RULES["coupled"])
        if verdict.distortion is not None:
            other = dataclasses.replace(other, distortion=jnp.zeros_like(verdict.distortion))
        return jax.tree.map(functools.partial(_where_rows, coupled), other, verdict)

    return cast(Verdict, lax.cond((coupled & ~state.done).any(), both, own))


def _where_rows(chosen: Array, one: Array, other: Array) -> Array:
    """Return ``one[b]`` if ``chosen[b]``, else ``other[b]``."""
    return jnp.where(chosen.reshape(-1, *(1,) * (one.ndim - 1)), one, other)


class _Stop(NamedTuple):
    """The position at which each row stops, ``[B]``.

    Attributes:
        gained: how many tokens the row gains.
        limit: how many tokens the row may still gain.
        to_eos: the number of next tokens up to and including EOS; K + 1 if there is no EOS.
        ended: whether the row has reached EOS or its limit.
        invalid: whether the row has reached a distribution with no mass.
    """

    gained: Array
    limit: Array
    to_eos: Array
    ended: Array
    invalid: Array


def _stop(params: RequestParams, state: DecodeState, num_accepted: Array, path: Path) -> _Stop:
    """Return where each row stops: at EOS, at its limit, or at an invalid target distribution."""
    tokens, width = path.tokens, path.tokens.shape[1]
    # If the target's distribution has no mass (its logits were not finite), there is no next token.
    no_mass = ~(jnp.take_along_axis(path.target_probs, num_accepted[:, None, None], axis=1).sum((1, 2)) > 0)
    limit = params.limits - (state.lengths - params.prompt_lengths)
    is_eos = (tokens[:, :, None] == params.eos_ids[:, None, :]).any(-1)
    to_eos = jnp.where(is_eos.any(1), jnp.argmax(is_eos, axis=1).astype(jnp.int32) + 1, width)
    possible = num_accepted + (~no_mass).astype(jnp.int32)
    count = jnp.where(state.done, 0, jnp.minimum(possible, jnp.minimum(to_eos, limit)))
    last_is_eos = jnp.take_along_axis(is_eos, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    ended = last_is_eos & (count > 0) | (count == limit)
    return _Stop(count, limit, to_eos, ended, no_mass & (count == num_accepted) & ~ended & ~state.done)


def _committed(verdict: Verdict, path: Path, stop: _Stop) -> Verdict:
    """Return `verdict` without the tokens after a row's end. `next_token` becomes the row's last committed token.

    A roll-out may continue such a row later. The discarded tokens must not influence its drafts then, because the row
    uses the noise at their positions again.
    """
    num_accepted = jnp.where(stop.gained > 0, stop.gained - 1, verdict.num_accepted)
    next_token = jnp.take_along_axis(path.tokens, num_accepted[:, None], axis=1)[:, 0]
    return dataclasses.replace(verdict, num_accepted=num_accepted, next_token=next_token)


class _Extra(TypedDict):
    """The fields of a `RoundOutput` that do not depend on where rows stop."""

    raw_logprobs: Array
    top_ids: Array
    top_logprobs: Array
    out_of_vocab: Array


def _output(state: DecodeState, verdict: Verdict, path: Path, stop: _Stop, extra: _Extra) -> RoundOutput:
    """Return the round's output, including the fields in `extra`."""
    num_accepted = verdict.num_accepted
    accepted = jnp.minimum(num_accepted, stop.gained)
    # 1 if the correction of a rejected draft token is committed.
    refused = ((num_accepted < path.num_guessed) & (num_accepted < stop.gained)).astype(jnp.int32)
    # An accepted EOS token ends the draft.
    depth = jnp.minimum(jnp.where(stop.to_eos <= accepted, stop.to_eos, stop.limit), path.guesses.shape[1] - 1)
    drafted = jnp.take_along_axis(path.guesses, depth[:, None], axis=1)[:, 0]
    return RoundOutput(
        tokens=path.tokens,
        count=stop.gained,
        logprobs=jnp.log(at_tokens(path.target_probs, path.tokens)),
        origins=_origins(num_accepted, path.num_guessed, path.tokens.shape[1]),
        drafted=jnp.where(state.done, 0, drafted),
        judged=accepted + refused,
        accepted=accepted,
        invalid=stop.invalid,
        distortion=_distortion(verdict, stop.gained),
        **extra,
    )


def _top(params: RequestParams, state: DecodeState, logits: Array, num_top: int) -> tuple[Array, Array]:
    """Return the most likely tokens of ``logits[B, K + 1, V]`` if an active row requests any; else zeros."""

    def found() -> tuple[Array, Array]:
        return top_logprobs(logits, num_top)

    def nothing() -> tuple[Array, Array]:
        shape = (*logits.shape[:2], num_top)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    if not num_top or params.top_logprobs is None:
        return nothing()
    return cast(tuple[Array, Array], lax.cond(((params.top_logprobs > 0) & ~state.done).any(), found, nothing))


def _distortion(verdict: Verdict, count: Array) -> Array:
    """Return the total distortion of each row's new tokens, ``float32[B]``."""
    if verdict.distortion is None:
        return jnp.zeros(count.shape, jnp.float32)
    kept = prefix_mask(count, verdict.distortion.shape[1])
    return jnp.where(kept, verdict.distortion, 0).sum(1).astype(jnp.float32)


def _commit(draft_length: DraftLength, state: DecodeState, new: RoundOutput) -> DecodeState:
    """Return the state with the new tokens added."""
    counts = state.token_counts
    if counts is not None:
        counts = add_tokens(counts, new.tokens, prefix_mask(new.count, new.tokens.shape[1]))
    return dataclasses.replace(
        state,
        tokens=write_rows(state.tokens, new.tokens, state.lengths),
        lengths=state.lengths + new.count,
        token_counts=counts,
        draft_length=draft_length.update(state.draft_length, new.drafted, new.accepted),
    )


def _origins(num_accepted: Array, guessed: Array, width: int) -> Array:
    """Return the origins of a path's tokens, ``int8[B, K + 1]``."""
    none = BONUS if width == 1 else NO_DRAFT  # K = 0 is plain decoding, which does not draft
    after = jnp.where(num_accepted < guessed, CORRECTED, jnp.where(guessed > 0, BONUS, none))
    return jnp.where(prefix_mask(num_accepted, width), ACCEPTED, after[:, None]).astype(jnp.int8)
