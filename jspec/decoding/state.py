# pyright: strict, reportUnknownMemberType=false
"""The input and output of a round. Every leaf has B as its first axis, so that each row could be handled alone."""

from typing import Any

from jax import Array

from jspec.core.sampling import LogitsTransforms, TokenCounts
from jspec.core.types import Record, pytree
from jspec.models.kv_cache import KVCache


@pytree
class RequestParams:
    """Parameters that are constant during the generation, one entry for each row.

    Attributes:
        keys: typed keys ``[B]``.
        prompt_lengths: ``int32[B]``.
        limits: ``int32[B]``, most new tokens.
        eos_ids: ``int32[B, n]``, tokens that end a row; -1 matches none.
        transforms, draft_transforms: the transforms of target and draft.
        min_tokens: ``int32[B]``, the number of first new tokens that must not be EOS; None for none.
        top_logprobs: ``int32[B]``, how many of the likeliest tokens to report with raw log-probabilities; at most the
            `num_top` of `jspec.decoding.round.play_round`. None for none.
        constraints: ``int32[B]``, the number of the text's constraint, or 0; None for none.
        coupled: ``bool[B]``, rows that the rule "coupled" verifies in place of the program's own rule; None for none.
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
    """The state that the next round needs. Tokens have K + 1 spare slots: a round may write that far after the limit.

    Attributes:
        tokens: ``int32[B, W]``, prompt and text; valid up to ``lengths[b]``.
        lengths: ``int32[B]``, committed tokens, prompt included.
        done: ``bool[B]``, rows that are finished and no longer change.
        cache: the target's KV cache; holds every committed token but the last.
        drafter: the drafter's own state.
        token_counts: the token counts for penalties, or None.
        draft_length: the state of a `jspec.drafters.draft_length.DraftLength`.
        drafts: ``bool[B]``, rows whose drafter has read the text, so that its draft tokens count; None for all.
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
    """The output of a round; empty in a row that was done before.

    Attributes:
        tokens: ``int32[B, K + 1]``; the first ``count[b]`` are new. Values after them are arbitrary, here and below.
        count: ``int32[B]`` in 0 .. K + 1.
        logprobs, raw_logprobs: ``float32[B, K + 1]``, as in `jspec.core.types.Output`.
        origins: ``int8[B, K + 1]``, as in `jspec.core.types.Output`.
        drafted, judged, accepted: ``int32[B]``, numbers of draft tokens, as counted in `jspec.core.types.Stats`.
        invalid: ``bool[B]``, whether the row stopped because the target's logits define no distribution.
        distortion: ``float32[B]``, summed over the new tokens.
        strange: ``bool[B]``, whether a drafter from outside jspec has drafted an id outside the vocabulary.
        top_ids, top_logprobs: ``int32[B, K + 1, n]`` and ``float32``, the likeliest tokens, highest first, and their
            raw log-probabilities; arbitrary if no row requests them.
        record: the draft tokens of this round alone, see `jspec.decoding.recording.of_round`.
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
