"""The input and output of a round. Every leaf has B as its first axis, so that each row can be handled separately."""

from jax import Array

from jspec.core.sampling import LogitsTransforms, TokenCounts
from jspec.core.types import PyTree, Record, pytree
from jspec.models.kv_cache import KVCache


@pytree
class RequestParams:
    """Parameters that stay constant during generation, with one entry per row.

    Attributes:
        keys: typed keys ``[B]``.
        prompt_lengths: ``int32[B]``.
        limits: ``int32[B]``, the maximum number of new tokens.
        eos_ids: ``int32[B, n]``, the tokens that end a row; -1 matches no token.
        transforms, draft_transforms: the logits transforms of the target and of the draft.
        min_tokens: ``int32[B]``, how many of the first new tokens must not be EOS; None if no row has a minimum.
        top_logprobs: ``int32[B]``, the number of most likely tokens to report with raw log-probabilities; at most the
            `num_top` of `jspec.decoding.round.decode_round`. None if no row reports any.
        constraints: ``int32[B]``, the number of the row's constraint, or 0; None if no row is constrained.
        coupled: ``bool[B]``, whether the rule "coupled" verifies the row in place of the program's own rule; None if no
            row is coupled.
    """

    keys: Array
    prompt_lengths: Array
    limits: Array
    eos_ids: Array
    transforms: LogitsTransforms
    draft_transforms: LogitsTransforms
    min_tokens: Array | None = None
    top_logprobs: Array | None = None
    constraints: Array | None = None
    coupled: Array | None = None


@pytree
class DecodeState:
    """The state that the next round needs. `tokens` has K + 1 spare columns: a round may write that far past the limit.

    Attributes:
        tokens: ``int32[B, W]``, the prompt and the new tokens; valid up to ``lengths[b]``.
        lengths: ``int32[B]``, the number of committed tokens, including the prompt.
        done: ``bool[B]``, whether the row is finished and no longer changes.
        cache: the target's KV cache. It holds every committed token except the last.
        drafter: the drafter's own state.
        token_counts: the token counts for penalties, or None.
        draft_length: the state of a `jspec.drafters.draft_length.DraftLength`.
        drafts: ``bool[B]``, whether the drafter has read the row's text, so that its draft tokens count; None for all.
    """

    tokens: Array
    lengths: Array
    done: Array
    cache: KVCache
    drafter: PyTree
    token_counts: TokenCounts | None
    draft_length: PyTree
    drafts: Array | None = None


@pytree
class RoundOutput:
    """The output of a round; empty for rows that were already done.

    Attributes:
        tokens: ``int32[B, K + 1]``; the first ``count[b]`` are new. In every field with a token axis, entries after the
            first ``count[b]`` are arbitrary.
        count: ``int32[B]`` in 0 .. K + 1.
        logprobs, raw_logprobs: ``float32[B, K + 1]``, as in `jspec.core.types.Output`.
        origins: ``int8[B, K + 1]``, as in `jspec.core.types.Output`.
        drafted, judged, accepted: ``int32[B]``, the number of drafted, verified and accepted tokens, as in
            `jspec.core.types.Stats`.
        invalid: ``bool[B]``, whether the row stopped because the target's logits define no distribution.
        distortion: ``float32[B]``, the sum over the new tokens.
        out_of_vocab: ``bool[B]``, whether a drafter from outside jspec has drafted an id outside the vocabulary.
        top_ids, top_logprobs: ``int32[B, K + 1, n]`` and ``float32[B, K + 1, n]``, the most likely tokens, highest
            first, and their raw log-probabilities; arbitrary if no row requests them.
        record: the draft tokens of this round only. See `jspec.decoding.recording.of_round`.
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
    out_of_vocab: Array
    top_ids: Array
    top_logprobs: Array
    record: Record | None = None
