# pyright: reportUnknownArgumentType=false
"""Log-probabilities of finished texts, with gradients, in bounded memory."""

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
    token_probs,
)
from jspec.core.types import check_count, pytree
from jspec.decoding.inputs import AnyArray
from jspec.decoding.program import traced
from jspec.decoding.validate_arguments import as_array, check_prompts, check_target
from jspec.decoding.validate_positions import check_positions
from jspec.decoding.validate_sampling import check_sampling
from jspec.models.language_model import LanguageModel
from jspec.models.logprobs import raw_logprobs

_CHUNK = 128  # positions whose logits are in memory at the same time


@pytree
class Scores:
    """The result of `logprobs`. All entries are for the token at the same index, and 0 at index 0 and after the end.

    Attributes:
        logprobs: ``float32[B, S]``, the log-probability under the distribution after all transforms, as in
            `Output.logprobs`.
        raw_logprobs: ``float32[B, S]``, the log-softmax of the logits, as in `Output.raw_logprobs`.
        entropies: ``float32[B, S]``, the entropy in nats of the distribution after all transforms.
        kl: ``float32[B, S]``, the KL divergence in nats of the model's own distribution from that of the reference;
            None without a reference.
    """

    logprobs: Array
    raw_logprobs: Array
    entropies: Array
    kl: Array | None = None


class _Settings(NamedTuple):
    """What `logprobs` needs besides the models and the texts."""

    prompt_lengths: Array
    transforms: LogitsTransforms
    min_tokens: Array | None
    eos_ids: Array


_Chunk: TypeAlias = tuple[Array, Array | None, Array, Array]  # hidden states (two models), tokens and their indices


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

    The result is that of `generate`, up to rounding. Unlike `generate`, it has gradients with respect to the models'
    weights. Logits are computed for `chunk` positions at a time, and again for the gradient, so that memory does not
    grow with the length times the vocabulary. You can call this function inside your own `jax.jit`.

    Args:
        target: a `jspec.Llama` or another model.
        tokens: ``int32[B, S]``, the texts, padded on the right with any values. `Output.with_prompts` returns them.
        lengths: ``int32[B]`` in 1..S.
        sampling: the parameters with which the texts were sampled; `max_tokens` and the draft's parameters are ignored.
        prompt_lengths: ``int32[B]``, how many tokens of each text are its prompt. Required if `sampling` has penalties
            or `min_tokens`, which distinguish the prompt from new tokens.
        eos_ids: as in `generate`, for `min_tokens`.
        reference: another model with the same vocabulary, for the KL divergence.
        chunk: the number of positions. It does not change the result.

    Raises:
        ValueError, TypeError: an argument is invalid, or `prompt_lengths` is missing.
    """
    tokens, lengths, ends = (
        as_array(*pair) for pair in (("tokens", tokens), ("lengths", lengths), ("eos_ids", np.atleast_1d(eos_ids)))
    )
    batch = _check(target, reference, tokens, lengths, sampling, chunk)
    fields = traced(sampling, ends, 0)
    needs_prompts = fields.transforms.penalised or fields.min_tokens is not None
    if prompt_lengths is None and needs_prompts:
        raise ValueError(
            "sampling has penalties or min_tokens, which start after the prompt; pass prompt_lengths, too."
        )
    settings = _Settings(
        prompt_lengths=jnp.zeros(batch, jnp.int32) if prompt_lengths is None else jnp.asarray(prompt_lengths),
        transforms=broadcast_rows(fields.transforms, batch),
        min_tokens=None if fields.min_tokens is None else jnp.broadcast_to(fields.min_tokens, (batch,)),
        eos_ids=jnp.broadcast_to(jnp.asarray(fields.eos_ids), (batch, ends.shape[-1])),
    )
    texts = jnp.where(prefix_mask(jnp.asarray(lengths), tokens.shape[1]), tokens, 0).astype(jnp.int32)
    return _scores(target, reference, texts, jnp.asarray(lengths), settings, int(chunk))


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
    batch, size = check_prompts(tokens, lengths, target.config), target.config.vocab_size
    check_sampling(sampling, batch, size)
    check_positions(target, None, lengths, 0, 0)
    if reference is not None:
        check_target(reference)
        if reference.config.vocab_size != size:
            raise ValueError(
                f"The reference's vocabulary has {reference.config.vocab_size} tokens and the target's {size}; pass a "
                "model with the same vocabulary."
            )
    return batch


def _scores(
    target: LanguageModel,
    reference: LanguageModel | None,
    texts: Array,
    lengths: Array,
    settings: _Settings,
    chunk: int,
) -> Scores:
    """Run both models over whole texts, and their output heads over one chunk of positions after another."""
    batch, size = texts.shape
    chunk = min(chunk, max(1, size - 1))
    count = max(1, -(-(size - 1) // chunk))
    padding = count * chunk - (size - 1)

    def chunks(array: Array) -> Array:
        """Return ``[B, S - 1, ...]`` as ``[chunks, B, chunk, ...]``."""
        array = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(batch, count, chunk, *array.shape[2:]), 1, 0)

    hidden = [None if model is None else chunks(_hidden(model, texts)[:, :-1]) for model in (target, reference)]
    indices = jnp.broadcast_to(jnp.arange(1, size), (batch, size - 1))
    counts = None
    if settings.transforms.penalised:
        counts = count_prompt(texts, settings.prompt_lengths, target.config.vocab_size)

    @jax.checkpoint
    def score(counts: TokenCounts | None, part: _Chunk) -> tuple[TokenCounts | None, Scores]:
        return _score_chunk(target, reference, settings, counts, part)

    inputs = hidden[0], hidden[1], chunks(texts[:, 1:]), chunks(indices)
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
    hidden, other, tokens, indices = part
    logits = target.logits(hidden)
    new = indices - settings.prompt_lengths[:, None]  # how many new tokens precede each token
    masked, seen = logits, None
    if settings.min_tokens is not None:
        ends = (settings.eos_ids[:, :, None] == jnp.arange(logits.shape[-1])).any(1)
        early = new < settings.min_tokens[:, None]
        masked = jnp.where(early[:, :, None] & ends[:, None], -jnp.inf, logits)
    if counts is not None:  # position s counts the new tokens before it in this chunk
        order = jnp.arange(tokens.shape[1])
        seen = (order[None, :] < order[:, None])[None] & (new >= 0)[:, None, :]
    probs = token_probs(masked, settings.transforms, counts, tokens if counts is not None else None, seen)
    scores = Scores(
        logprobs=_safe_log(at_tokens(probs, tokens)),
        raw_logprobs=raw_logprobs(logits, tokens),
        entropies=-(probs * jnp.where(probs > 0, _safe_log(probs), 0)).sum(-1),
        kl=None if reference is None or other is None else _kl(logits, reference.logits(other)),
    )
    return None if counts is None else add_tokens(counts, tokens, new >= 0), scores


def _safe_log(probs: Array) -> Array:
    """Return the log, which is -inf with the gradient 0 where a probability is 0."""
    return jnp.where(probs > 0, jnp.log(jnp.where(probs > 0, probs, 1)), -jnp.inf)


def _kl(logits: Array, other: Array) -> Array:
    own, others = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return (jnp.exp(own) * (own - others)).sum(-1)
