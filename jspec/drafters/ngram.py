"""Prompt lookup: what followed the last time the text read like this (Leviathan et al. 2023, section 3.6, "copy")."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Context, Stateless
from jspec.types import Draft, check_count


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["max_ngram", "min_ngram"])
@dataclasses.dataclass(frozen=True)
class NGramDrafter(Stateless):
    """Copies what followed the most recent of the longest earlier matches of the row's last tokens.

    The match may run into the draft: text that repeats with a period is copied on and on. A row without a match makes
    no guess. The law of a copied token is one-hot, so it is accepted with probability p(x).

    Attributes:
        max_ngram: tokens that are compared at most.
        min_ngram: tokens that must match at least.
    """

    max_ngram: int = 3
    min_ngram: int = 1
    vocab_size = None
    max_positions = None

    def __post_init__(self) -> None:
        for name in ("max_ngram", "min_ngram"):
            check_count(name, getattr(self, name))
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram} is more than max_ngram={self.max_ngram}; swap them.")

    def propose(self, state: tuple, context: Context, num_draft_tokens: int) -> tuple[Draft, tuple]:
        """The tokens behind the match, each with a one-hot law; laws of zeros in a row without a match."""
        tokens, found = jax.vmap(self._copy, (0, 0, None))(context.tokens, context.lengths, num_draft_tokens)
        laws = jax.nn.one_hot(tokens, context.vocab_size, dtype=jnp.float32) * found[:, None, None]
        return Draft(tokens, laws), state

    def _copy(self, tokens: Array, length: Array, num_draft_tokens: int) -> tuple[Array, Array]:
        """For one row, unbatched: ``int32[K]``, and whether there was a match."""
        ends = jnp.arange(tokens.size)
        same, matched = (ends < length - 1), jnp.zeros(tokens.size, jnp.int32)
        for back in range(self.max_ngram):
            same &= (jnp.roll(tokens, back) == tokens[length - 1 - back]) & (ends >= back)
            matched += same
        matched = jnp.where(matched >= self.min_ngram, matched, 0)
        end = jnp.argmax(matched * tokens.size + ends)  # the longest, and of those the last
        period = length - 1 - end
        source = end + 1 + jnp.arange(num_draft_tokens) % jnp.maximum(period, 1)
        return tokens[source].astype(jnp.int32), matched[end] > 0
