# pyright: strict, reportUnknownMemberType=false
"""Laws from counts: the next token whatever came before, or given the last one (Leviathan et al. 2023, 3.6 and 4.2)."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.core.tree import Level, Tree
from jspec.core.types import pytree
from jspec.drafters.base import Context
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter

_MOST_BYTES = 2**30


@pytree
class UnigramDrafter(AutoregressiveDrafter[tuple[()], tuple[()]]):
    """Drafts from one law, whatever came before.

    Attributes:
        logits: ``float32[V]``, log-probabilities.
    """

    logits: Array
    max_positions = None

    @classmethod
    def from_tokens(cls, tokens: Any, vocab_size: int, smoothing: float = 1.0) -> "UnigramDrafter":
        """The frequencies of ``tokens int[N]``, and of `smoothing` more tokens that are spread over the vocabulary.

        Raises:
            ValueError: no tokens, tokens outside the vocabulary, or smoothing that is not positive.
        """
        return cls(jnp.log(_unigram(checked_tokens(tokens, vocab_size, 1), vocab_size, smoothing)))

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def begin(self, state: tuple[()], context: Context, tree: Tree) -> tuple[Array, tuple[()]]:
        """The same law at every position, but for penalties."""
        return jnp.broadcast_to(self.logits, (context.lengths.size, self.vocab_size)), state

    def extend(self, carry: tuple[()], tokens: Array, level: Level, context: Context) -> tuple[Array, tuple[()]]:
        return jnp.broadcast_to(self.logits, (*tokens.shape, self.vocab_size)), carry


@pytree
class BigramDrafter(AutoregressiveDrafter[tuple[()], tuple[()]]):
    """Drafts from a law for each last token.

    Attributes:
        logits: ``float32[V, V]``, log-probabilities of the next token after each token.
    """

    logits: Array
    max_positions = None

    @classmethod
    def from_tokens(cls, tokens: Any, vocab_size: int, smoothing: float = 1.0) -> "BigramDrafter":
        """The frequencies of what follows each token in ``tokens int[N]``.

        After each come `smoothing` more tokens, spread as tokens are in all (`UnigramDrafter`).

        Raises:
            ValueError: fewer than two tokens, tokens outside the vocabulary, smoothing that is not positive, or a
                vocabulary whose table would not fit in 1 GiB.
        """
        if 4 * vocab_size**2 > _MOST_BYTES:
            raise ValueError(f"A table of {vocab_size} x {vocab_size} float32 takes {4 * vocab_size**2 / 2**30:.0f} "
                             "GiB; use UnigramDrafter or NGramDrafter with so large a vocabulary.")  # fmt: skip
        tokens = checked_tokens(tokens, vocab_size, 2)
        counts = np.zeros((vocab_size, vocab_size))
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
        counts += smoothing * _unigram(tokens, vocab_size, smoothing)
        counts /= counts.sum(1, keepdims=True)
        return cls(jnp.asarray(np.log(counts, out=counts), jnp.float32))

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def begin(self, state: tuple[()], context: Context, tree: Tree) -> tuple[Array, tuple[()]]:
        """One row of the table a token."""
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        return self.logits[last], state

    def extend(self, carry: tuple[()], tokens: Array, level: Level, context: Context) -> tuple[Array, tuple[()]]:
        return self.logits[tokens], carry


def _unigram(tokens: np.ndarray, vocab_size: int, smoothing: float) -> np.ndarray:
    """``float64[V]``, summing to 1."""
    if not (np.isfinite(smoothing) and smoothing > 0):
        raise ValueError(f"smoothing must be a positive number; got {smoothing!r}.")
    counts = np.bincount(tokens, minlength=vocab_size) + smoothing / vocab_size
    return counts / counts.sum()


def checked_tokens(tokens: Any, vocab_size: int, least: int) -> np.ndarray:
    """`tokens` as a NumPy array ``int[N]``.

    Raises:
        ValueError: fewer than `least` tokens, or ids outside the vocabulary.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.size < least:
        raise ValueError(f"tokens must be at least {least} token ids in one dimension; "
                         f"got {tokens.dtype} of shape {tokens.shape}.")  # fmt: skip
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"tokens reach from {tokens.min()} to {tokens.max()}, outside the vocabulary of {vocab_size}; "
                         "encode them with the target's tokenizer.")  # fmt: skip
    return tokens
