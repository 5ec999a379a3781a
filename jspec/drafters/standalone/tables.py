"""Drafters that use token counts: unigrams and bigrams (Leviathan et al. 2023, sections 3.6 and 4.2)."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jspec.core.tree import Level, Tree
from jspec.core.types import pytree
from jspec.drafters.base import Context
from jspec.drafters.draft_vocabulary import checked_tokens
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter

_MOST_BYTES = 2**30


@pytree
class UnigramDrafter(AutoregressiveDrafter[tuple[()], tuple[()]]):
    """A drafter with one fixed distribution, regardless of the sequence so far.

    Attributes:
        logits: ``float32[V]``, log-probabilities.
    """

    logits: Array

    @classmethod
    def from_tokens(cls, tokens: ArrayLike, vocab_size: int, smoothing: float = 1.0) -> "UnigramDrafter":
        """Return a drafter with the token frequencies of ``tokens int[N]``.

        `smoothing` is the total pseudo-count, which is spread evenly over the vocabulary.

        Raises:
            ValueError: there are no tokens, tokens are outside the vocabulary, or smoothing is not positive.
        """
        return cls(jnp.log(_unigram(checked_tokens(tokens, vocab_size, 1), vocab_size, smoothing)))

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def begin(self, state: tuple[()], context: Context, tree: Tree) -> tuple[Array, tuple[()]]:
        """Return the same distribution at every position, except for penalties."""
        return jnp.broadcast_to(self.logits, (context.lengths.size, self.vocab_size)), state

    def extend(self, carry: tuple[()], tokens: Array, level: Level, context: Context) -> tuple[Array, tuple[()]]:
        return jnp.broadcast_to(self.logits, (*tokens.shape, self.vocab_size)), carry


@pytree
class BigramDrafter(AutoregressiveDrafter[tuple[()], tuple[()]]):
    """A drafter whose distribution depends only on the previous token.

    Attributes:
        logits: ``float32[V, V]``, log-probabilities of the next token after each token.
    """

    logits: Array

    @classmethod
    def from_tokens(cls, tokens: ArrayLike, vocab_size: int, smoothing: float = 1.0) -> "BigramDrafter":
        """Return a drafter with the bigram frequencies of ``tokens int[N]``.

        `smoothing` is the total pseudo-count added to each row of the table, distributed like the unigram frequencies
        (`UnigramDrafter`).

        Raises:
            ValueError: there are fewer than two tokens, tokens are outside the vocabulary, smoothing is not positive,
                or the bigram table would not fit in 1 GiB.
        """
        if 4 * vocab_size**2 > _MOST_BYTES:
            raise ValueError(
                f"A {vocab_size} x {vocab_size} float32 table takes {4 * vocab_size**2 / 2**30:.0f} GiB; use "
                "UnigramDrafter or NGramDrafter for such a large vocabulary."
            )
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
        """Return the table row of each sequence's last token."""
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        return self.logits[last], state

    def extend(self, carry: tuple[()], tokens: Array, level: Level, context: Context) -> tuple[Array, tuple[()]]:
        return self.logits[tokens], carry


def _unigram(tokens: np.ndarray, vocab_size: int, smoothing: float) -> np.ndarray:
    """Return the token frequencies ``float64[V]``, which sum to 1."""
    if not (np.isfinite(smoothing) and smoothing > 0):
        raise ValueError(f"smoothing must be a positive number; got {smoothing!r}.")
    counts = np.bincount(tokens, minlength=vocab_size) + smoothing / vocab_size
    return counts / counts.sum()
