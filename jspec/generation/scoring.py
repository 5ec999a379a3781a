# pyright: reportUnknownArgumentType=false
"""Differentiable log-probabilities of finished texts, from the logits of a few positions at a time."""

import functools
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import ArrayLike

from jspec.core.probs import at_tokens
from jspec.core.row_ops import prefix_mask
from jspec.core.sampling import (
    LogitsTransforms,
    SamplingParams,
    TokenCounts,
    add_tokens,
    broadcast_rows,
    count_prompt,
    token_log_probs,
)
from jspec.core.sharding import on_any_mesh, vary_like
from jspec.core.transfers import values_if_known
from jspec.core.types import check_count, pytree
from jspec.decoding.inputs import AnyArray
from jspec.decoding.program import traced
from jspec.decoding.validate_arguments import as_array, as_settings, check_ids, check_prompts, check_target
from jspec.decoding.validate_sampling import check_sampling
from jspec.models.language_model import LanguageModel
from jspec.models.logprobs import raw_logprobs

_CHUNK = 128  # positions whose logits are in memory at the same time


@pytree
class Scores:
    """The result of `logprobs`. Column s describes token s; column 0 and columns after a text's end are 0.

    Attributes:
        logprobs: ``float32[B, S]``, the log-probability under the distribution after all transforms, as in
            `Output.logprobs`.
        raw_logprobs: ``float32[B, S]``, the log-softmax of the logits, as in `Output.raw_logprobs`.
        entropies: ``float32[B, S]``, the entropy in nats of the distribution after all transforms.
        kl: ``float32[B, S]``, KL(target || reference) in nats, between the softmaxes of their raw logits; None without
            a reference.
    """

    logprobs: Array
    raw_logprobs: Array
    entropies: Array
    kl: Array | None = None


class _Texts(NamedTuple):
    """The texts and the settings of `logprobs`, as arrays. The first has one row per text."""

    tokens: AnyArray
    lengths: AnyArray
    prompt_lengths: AnyArray
    transforms: LogitsTransforms
    min_tokens: AnyArray | None
    eos_ids: AnyArray


class _Settings(NamedTuple):
    """The settings of `logprobs`, with one entry per text."""

    prompt_lengths: Array
    transforms: LogitsTransforms
    min_tokens: Array | None
    eos_ids: Array


_Chunk: TypeAlias = tuple[Array, Array | None, Array, Array]  # both models' hidden states, tokens and their indices


def logprobs(
    target: LanguageModel,
    tokens: ArrayLike,
    lengths: ArrayLike,
    *,
    sampling: SamplingParams = SamplingParams(),
    prompt_lengths: ArrayLike | None = None,
    eos_ids: ArrayLike = (),
    reference: LanguageModel | None = None,
    chunk: int = _CHUNK,
) -> Scores:
    """Return the log-probability of each token of finished texts, given the tokens before it.

    For new tokens, the result equals `Output.logprobs` and `Output.raw_logprobs`, up to rounding. It is differentiable
    with respect to the models' weights. Logits are computed for `chunk` positions at a time and recomputed in the
    backward pass, so the logits of all positions are never in memory at once. You can call this function inside your
    own `jax.jit`.

    Args:
        target: a `jspec.Llama` or another model.
        tokens: ``int32[B, S]``, the texts, padded on the right with any values. `Output.with_prompts` returns them.
        lengths: ``int32[B]`` in 1..S, the number of tokens in each text, including its prompt.
        sampling: the parameters with which the texts were sampled; `max_tokens` and the draft's parameters are ignored.
        prompt_lengths: ``int32[B]``, the number of prompt tokens at the start of each text. Required with penalties or
            `min_tokens`; the entries of prompt tokens are then meaningless, and may be -inf. Select entries with
            ``jnp.where`` or ``mean(where=...)``, not with a product.
        eos_ids: as in `generate`, for `min_tokens`.
        reference: another model with the same vocabulary, for the KL divergence.
        chunk: the number of positions whose logits are in memory at once. It changes the result only by rounding.

    Raises:
        ValueError, TypeError: an argument is invalid, or `prompt_lengths` is missing.
    """
    tokens, lengths = as_array("tokens", tokens), as_array("lengths", lengths)
    sampling, ends = as_settings(sampling, eos_ids)
    batch = _check(target, reference, tokens, lengths, sampling, chunk)
    check_ids(ends, 0, batch, target.config.vocab_size)
    fields = traced(sampling, ends, 0)
    needs_prompts = fields.transforms.penalised or fields.min_tokens is not None
    if prompt_lengths is None and needs_prompts:
        raise ValueError(
            "sampling has penalties or min_tokens, which need the boundary between prompt and new tokens; pass "
            "prompt_lengths."
        )
    starts = np.zeros(batch, np.int32) if prompt_lengths is None else as_array("prompt_lengths", prompt_lengths)
    _check_prompt_lengths(starts, lengths)
    texts = _Texts(tokens, lengths, starts, fields.transforms, fields.min_tokens, fields.eos_ids)
    return cast(Scores, _scores(target, reference, texts, chunk=int(chunk)))


def _check(
    target: LanguageModel,
    reference: LanguageModel | None,
    tokens: AnyArray,
    lengths: AnyArray,
    sampling: SamplingParams,
    chunk: int,
) -> int:
    """Check the arguments of `logprobs`, and return the batch size."""
    check_target(target)
    check_count("chunk", chunk)
    batch, size = check_prompts(tokens, lengths, target.config, "text"), target.config.vocab_size
    check_sampling(sampling, batch, size)
    if reference is not None:
        check_target(reference)
        if reference.config.vocab_size != size:
            raise ValueError(
                f"The reference's vocabulary has {reference.config.vocab_size} tokens and the target's {size}; pass a "
                "model with the same vocabulary."
            )
    known = values_if_known(lengths)
    for name, model in (("target", target), ("reference", reference)):
        limit = None if model is None else model.config.max_position_embeddings
        if known is not None and limit is not None and (long := np.flatnonzero(known > limit)).size:
            raise ValueError(
                f"Text {long[0]} of {known[long[0]]} tokens exceeds the {limit} positions of the {name}; shorten it."
            )
    return batch


def _check_prompt_lengths(starts: AnyArray, lengths: AnyArray) -> None:
    if starts.shape != lengths.shape or not jnp.issubdtype(starts.dtype, jnp.integer):
        raise ValueError(
            f"prompt_lengths must be integers of shape {list(lengths.shape)}, one for each text; got {starts.dtype} of "
            f"shape {list(starts.shape)}."
        )
    first, last = values_if_known(starts), values_if_known(lengths)
    if first is not None and last is not None and (bad := np.flatnonzero((first < 0) | (first > last))).size:
        raise ValueError(
            f"prompt_lengths[{bad[0]}] is {first[bad[0]]}, but text {bad[0]} has {last[bad[0]]} tokens; pass the "
            "number of tokens before the first new one."
        )


@functools.partial(jax.jit, static_argnames="chunk")
@on_any_mesh
def _scores(target: LanguageModel, reference: LanguageModel | None, texts: _Texts, *, chunk: int) -> Scores:
    """Run both models over the whole texts, then compute logits and scores one chunk of positions at a time."""
    batch, size = texts.tokens.shape
    lengths, starts = (jnp.asarray(part).astype(jnp.int32) for part in (texts.lengths, texts.prompt_lengths))
    tokens = jnp.where(prefix_mask(lengths, size), texts.tokens, 0).astype(jnp.int32)
    settings = _Settings(
        prompt_lengths=starts,
        transforms=broadcast_rows(texts.transforms, batch),
        min_tokens=None if texts.min_tokens is None else jnp.broadcast_to(texts.min_tokens, (batch,)),
        eos_ids=jnp.broadcast_to(jnp.asarray(texts.eos_ids), (batch, texts.eos_ids.shape[-1])),
    )
    chunk = min(chunk, max(1, size - 1))
    count = max(1, -(-(size - 1) // chunk))
    padding = count * chunk - (size - 1)

    def chunks(array: Array) -> Array:
        """Return ``[B, S - 1, ...]`` as ``[chunks, B, chunk, ...]``."""
        array = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(batch, count, chunk, *array.shape[2:]), 1, 0)

    hidden = [None if model is None else chunks(_hidden(model, tokens)[:, :-1]) for model in (target, reference)]
    indices = jnp.broadcast_to(jnp.arange(1, size), (batch, size - 1))
    counts = None
    if settings.transforms.penalised:
        counts = vary_like(count_prompt(tokens, starts, target.config.vocab_size), tokens)

    @jax.checkpoint
    def score(counts: TokenCounts | None, part: _Chunk) -> tuple[TokenCounts | None, Scores]:
        return _score_chunk(target, reference, settings, counts, part)

    inputs = hidden[0], hidden[1], chunks(tokens[:, 1:]), chunks(indices)
    parts = cast(tuple[object, Scores], lax.scan(score, counts, inputs))[1]
    valid = prefix_mask(lengths, size)

    def joined(part: Array) -> Array:
        whole = jnp.moveaxis(part, 0, 1).reshape(batch, -1)[:, : size - 1]
        return jnp.where(valid, jnp.pad(whole, ((0, 0), (1, 0))), 0)

    return jax.tree.map(joined, parts)


def _hidden(model: LanguageModel, texts: Array) -> Array:
    return model.forward(texts, model.new_cache(*texts.shape), jnp.zeros(len(texts), jnp.int32))[0]


def _score_chunk(
    target: LanguageModel,
    reference: LanguageModel | None,
    settings: _Settings,
    counts: TokenCounts | None,
    part: _Chunk,
) -> tuple[TokenCounts | None, Scores]:
    """Return the scores of one chunk ``[B, C]``, and the token counts after it."""
    hidden, reference_hidden, tokens, indices = part
    logits = target.logits(hidden)
    num_new = indices - settings.prompt_lengths[:, None]  # new tokens before each token; negative in the prompt
    masked, seen = logits, None
    if settings.min_tokens is not None:
        is_eos = (settings.eos_ids[:, :, None] == jnp.arange(logits.shape[-1])).any(1)
        early = num_new < settings.min_tokens[:, None]
        masked = jnp.where(early[:, :, None] & is_eos[:, None], -jnp.inf, logits)
    if counts is not None:  # position s counts the new tokens before it in this chunk
        order = jnp.arange(tokens.shape[1])
        seen = (order[None, :] < order[:, None])[None] & (num_new >= 0)[:, None, :]
    drafted = tokens if counts is not None else None
    log_probs = token_log_probs(masked, settings.transforms, counts, drafted, seen)
    scores = Scores(
        logprobs=at_tokens(log_probs, tokens),
        raw_logprobs=raw_logprobs(logits, tokens),
        entropies=-(jnp.exp(log_probs) * jnp.where(log_probs > -jnp.inf, log_probs, 0)).sum(-1),
        kl=None if reference is None or reference_hidden is None else _kl(logits, reference.logits(reference_hidden)),
    )
    return None if counts is None else add_tokens(counts, tokens, num_new >= 0), scores


def _kl(logits: Array, other: Array) -> Array:
    own, others = (jax.nn.log_softmax(part.astype(jnp.float32)) for part in (logits, other))
    return (jnp.exp(own) * jnp.where(own > -jnp.inf, own - others, 0)).sum(-1)
