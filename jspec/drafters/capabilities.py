# pyright: strict, reportUnknownMemberType=false
"""Optional drafter attributes: requests to the target, the longest chain, and how combined drafters forward them."""

import math
from collections.abc import Iterable
from typing import Any

from jax import Array


def features_of(drafter: Any) -> tuple[int, ...]:
    """Return the indices of the target's hidden states that a drafter reads; most drafters read none."""
    return tuple(getattr(drafter, "features", ()))


def num_likeliest_of(drafter: Any) -> int:
    """Return the number of the target's most likely tokens that a drafter requests; 0 for most drafters."""
    return getattr(drafter, "num_likeliest", 0)


def embeddings_of(drafter: Any) -> Array | None:
    """Return the vectors ``[M, E]`` that the target reads in place of ids from V on; None for most drafters."""
    return getattr(drafter, "embeddings", None)


def max_chain_length_of(drafter: Any) -> float:
    """Return the number of consecutive tokens that a drafter can draft; infinity for most drafters."""
    return getattr(drafter, "max_chain_length", math.inf)


def has_confidence(drafter: Any) -> bool:
    """Return whether a drafter can report its confidence in its draft tokens."""
    return getattr(drafter, "has_confidence", hasattr(drafter, "extend"))


def least(limits: Iterable[int | None]) -> int | None:
    """Return the smallest of `limits`, ignoring None, or None if there are no limits."""
    return min((limit for limit in limits if limit is not None), default=None)


class WrapperDrafter:
    """A wrapper around `draft` that forwards its requests to the target, and the target's values back to it."""

    draft: Any

    @property
    def parts(self) -> tuple[Any, ...]:
        return (self.draft,)

    @property
    def vocab_size(self) -> int | None:
        return self.draft.vocab_size

    @property
    def max_positions(self) -> int | None:
        return getattr(self.draft, "max_positions", None)

    @property
    def max_chain_length(self) -> float:
        return max_chain_length_of(self.draft)

    @property
    def features(self) -> tuple[int, ...]:
        return features_of(self.draft)

    @property
    def num_likeliest(self) -> int:
        return num_likeliest_of(self.draft)

    @property
    def embeddings(self) -> Array | None:
        return embeddings_of(self.draft)


def features_of_all(*parts: Any) -> tuple[int, ...]:
    """Return the indices of all hidden states that several drafters read, each once."""
    return tuple(dict.fromkeys(i for part in parts for i in features_of(part)))


def signals_for(part: Any, features: tuple[int, ...], target_signals: dict[str, Any]) -> dict[str, Any]:
    """Return the values that `part` requests, from the values `target_signals` that its combined drafter received.

    Args:
        features: the combined drafter's features.
    """
    mine: dict[str, Any] = {}
    if wanted := features_of(part):
        mine = {name: each for name, each in target_signals.items() if name != "likeliest"}
        if wanted != features:
            mine["features"] = target_signals["features"][:, :, [features.index(i) for i in wanted]]
    if (count := num_likeliest_of(part)) and "likeliest" in target_signals:
        mine["likeliest"] = target_signals["likeliest"][..., :count]
    return mine
