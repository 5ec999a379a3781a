# pyright: strict, reportUnknownMemberType=false
"""What goes into a round and what comes out of it. Every leaf has B first, so that each row could be handled alone."""

from typing import Any

from jax import Array

from jspec.core.sampling import LogitsTransforms, TokenCounts
from jspec.core.types import Record, pytree
from jspec.models.kv_cache import KVCache


@pytree
class RequestParams:
    """What stays the same for the whole generation, one entry a row.

    Attributes:
        keys: typed keys ``[B]``.
        prompt_lengths: ``int32[B]``.
        limits: ``int32[B]``, most new tokens.
        eos_ids: ``int32[B, n]``, tokens that end a row; -1 matches none.
        transforms, draft_transforms: the transforms of target and draft.
        min_tokens: ``int32[B]``, among how many new tokens no end of text may be; None for none.
        top_logprobs: ``int32[B]``, of how many of the likeliest tokens the raw log-probabilities are asked for, at most
            as many as `jspec.decoding.round.play_round` is to find; None for none.
        constraints: ``int32[B]``, the number of what constrains the text, or 0; None for none.
        coupled: ``bool[B]``, rows that the rule "coupled" judges in place of the program's own; None for none.
    """

    keys: Array
    prompt_lengths: Array
    limits: Array
    eos_ids: Array
    transforms: LogitsTransforms
    draft_transforms: LogitsTransforms
    min_tokens: Any = None
    top_logprobs: Any = None
    constraints: Any = None
    coupled: Any = None


@pytree
class DecodeState:
    """What the next round needs. Tokens have K + 1 spare slots: a round may write that far past the last limit.

    Attributes:
        tokens: ``int32[B, W]``, prompt and text; valid up to ``lengths[b]``.
        lengths: ``int32[B]``, committed tokens, prompt included.
        done: ``bool[B]``; such a row no longer moves.
        cache: the target's; holds every committed token but the last.
        drafter: the drafter's own state.
        token_counts: what penalties look at, or None.
        draft_length: what a `jspec.drafters.draft_length.DraftLength` remembers.
        drafts: ``bool[B]``, rows whose drafter has read the text, so that its guesses count; None for all.
    """

    tokens: Array
    lengths: Array
    done: Array
    cache: KVCache
    drafter: Any
    token_counts: TokenCounts | None
    draft_length: Any
    drafts: Any = None


@pytree
class RoundOutput:
    """What a round has brought; nothing, in a row that was done before.

    Attributes:
        tokens: ``int32[B, K + 1]``, of which the first ``count[b]`` are new; behind them anything, here and below.
        count: ``int32[B]`` in 0 .. K + 1.
        logprobs, raw_logprobs: ``float32[B, K + 1]``, as in `jspec.core.types.Output`.
        origins: ``int8[B, K + 1]``, the same.
        drafted, judged, accepted: ``int32[B]``, drafts, as counted in `jspec.core.types.Stats`.
        invalid: ``bool[B]``, whether the row has stopped because the target's logits are no law.
        distortion: ``float32[B]``, summed over the new tokens.
        strange: ``bool[B]``, whether a drafter that is not jspec's own has guessed an id outside the vocabulary.
        top_ids, top_logprobs: ``int32[B, K + 1, n]`` and ``float32``, the likeliest tokens, highest first, and
            their raw log-probabilities; anything where no row asks for them.
        record: the guesses of this round alone, see `jspec.decoding.recording.of_round`.
    """

    tokens: Array
    count: Array
    logprobs: Array
    raw_logprobs: Array
    origins: Array
    drafted: Array
    judged: Array
    accepted: Array
    invalid: Array
    distortion: Array
    strange: Array
    top_ids: Array
    top_logprobs: Array
    record: Record | None = None
