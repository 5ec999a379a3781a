"""Accessors for the attributes that drafters declare, and a base class for wrappers that forward these attributes.

The accessors also accept None in place of a drafter.
"""

from collections.abc import Iterable
from typing import cast

from jax import Array

from jspec.core.types import PyTree
from jspec.drafters.base import Drafter, DraftSource, State, declared


def features_of(drafter: object) -> tuple[int, ...]:
    """Return the indices of the target's hidden states that a drafter reads; most drafters read none."""
    return tuple(declared(drafter).features)


def num_top_tokens_of(drafter: object) -> int:
    """Return the number of the target's most likely tokens that a drafter requests; 0 for most drafters."""
    return declared(drafter).num_top_tokens


def embeddings_of(drafter: object) -> Array | None:
    """Return the vectors ``[M, E]`` that the target reads for ids from V on; None for most drafters."""
    return declared(drafter).embeddings


def max_chain_length_of(drafter: object) -> float:
    """Return the number of consecutive tokens that a drafter can draft; infinity for most drafters."""
    return declared(drafter).max_chain_length


def has_confidence(drafter: object) -> bool:
    """Return whether a drafter can report its confidence in its draft tokens."""
    return declared(drafter).has_confidence


def least(limits: Iterable[int | None]) -> int | None:
    """Return the smallest of `limits`, ignoring None, or None if there are no limits."""
    return min((limit for limit in limits if limit is not None), default=None)


def features_of_all(*parts: Drafter[PyTree]) -> tuple[int, ...]:
    """Return the indices of all hidden states that several drafters read, without duplicates."""
    return tuple(dict.fromkeys(i for part in parts for i in features_of(part)))


class WrapperDrafter(Drafter[State]):
    """A wrapper around `draft` that declares the same limits and requests as `draft`."""

    draft: DraftSource

    @property
    def inner(self) -> Drafter[PyTree]:
        """The wrapped drafter."""
        return cast(Drafter[PyTree], self.draft)

    @property
    def parts(self) -> tuple[Drafter[PyTree], ...]:
        return (self.inner,)

    @property
    def vocab_size(self) -> int | None:
        return self.inner.vocab_size

    @property
    def max_positions(self) -> int | None:
        return declared(self.draft).max_positions

    @property
    def max_chain_length(self) -> float:
        return declared(self.draft).max_chain_length

    @property
    def features(self) -> tuple[int, ...]:
        return features_of(self.draft)

    @property
    def num_top_tokens(self) -> int:
        return declared(self.draft).num_top_tokens

    @property
    def embeddings(self) -> Array | None:
        return declared(self.draft).embeddings
