"""Reduced draft vocabularies: the choice of the tokens that a drafter can draft, and logits over these tokens.

A draft step then computes only some rows of the output head, which holds a large part of a small model's weights (Zhao
et al. 2025, "FR-Spec"). All other tokens have probability 0 in the draft, so acceptance rules stay exact.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jspec.core.types import check_count


def frequent_tokens(tokens: ArrayLike, count: int, vocab_size: int, always: Sequence[int] = ()) -> np.ndarray:
    """Return the `count` most frequent tokens of ``tokens int[N]``, as ``int64[count]`` in ascending order.

    Count the tokens of text that the target generated, because such text best predicts which tokens the target will
    accept. Among tokens that occur equally often, those with the lowest ids are chosen.

    Args:
        tokens: the tokens to count, such as the output of `jspec.generate` without its padding.
        count: the number of tokens to return.
        vocab_size: the number of tokens in the vocabulary.
        always: tokens to include however often they occur, such as the target's EOS ids.

    Raises:
        ValueError: a token is outside the vocabulary, or `count` is larger than the vocabulary or too small for
            `always`.
    """
    check_count("count", count)
    tokens = checked_tokens(tokens, vocab_size, 1)
    needed = checked_tokens(np.array(always), vocab_size, 1) if len(always) else np.zeros(0, np.int64)
    least = np.unique(needed).size
    if not least <= count <= vocab_size:
        raise ValueError(
            f"count={count} must be at least {least}, the number of tokens in always, and at most {vocab_size}, the "
            "vocabulary's size; choose a count in this range."
        )
    counts = np.bincount(tokens, minlength=vocab_size)
    counts[needed] = tokens.size + 1
    return most_counted(counts, count)


def most_counted(counts: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` tokens with the largest ``counts int[V]``, as ``int64[count]`` in ascending order."""
    return np.sort(np.argsort(-counts, kind="stable")[:count])


def checked_tokens(tokens: ArrayLike, vocab_size: int, least: int) -> np.ndarray:
    """Return `tokens` as a NumPy array ``int[N]``.

    Raises:
        ValueError: there are fewer than `least` tokens, or token ids are outside the vocabulary.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size < least:
        raise ValueError(
            f"tokens must be at least {least} token ids in one dimension; got {tokens.dtype} of shape {tokens.shape}."
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"tokens range from {tokens.min()} to {tokens.max()}, outside the vocabulary of {vocab_size}; encode "
            "them with the target's tokenizer."
        )
    return tokens


def checked_vocabulary(tokens: ArrayLike, vocab_size: int) -> np.ndarray:
    """Return `tokens`, which must be distinct, as a NumPy array ``int[D]``.

    Raises:
        ValueError: there are no tokens, a token occurs twice, or token ids are outside the vocabulary.
    """
    tokens = checked_tokens(tokens, vocab_size, 1)
    values, counts = np.unique(tokens, return_counts=True)
    if values.size < tokens.size:
        raise ValueError(
            f"Token {values[counts.argmax()]} occurs {counts.max()} times in tokens; pass each token once, for example "
            "with numpy.unique."
        )
    return tokens


def draft_ids_of(tokens: np.ndarray, vocab_size: int) -> Array:
    """Return ``int32[V]``: each token's index in ``tokens[D]``, or D for a token that is not among them."""
    draft_ids = np.full(vocab_size, len(tokens), np.int32)
    draft_ids[tokens] = np.arange(len(tokens))
    return jnp.asarray(draft_ids)


def target_ids_of(draft_ids: Array, count: int | None) -> Array:
    """Return the tokens ``int32[D]`` from which `draft_ids_of` made ``draft_ids[V]``, where `count` is D."""
    return jnp.argsort(draft_ids, stable=True)[:count]


def spread_logits(logits: Array, draft_ids: Array) -> Array:
    """Return ``[B, S, V]``: ``logits[B, S, D]`` for the tokens that can be drafted, and -inf for all other tokens."""
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    return jnp.take(padded, draft_ids, axis=-1)
