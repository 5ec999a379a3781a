# pyright: strict, reportUnknownMemberType=false
"""What a drafter asks the target for besides its text, how far it guesses, and who passes that on."""

import math
from collections.abc import Iterable
from typing import Any

from jax import Array


def features_of(drafter: Any) -> tuple[int, ...]:
    """Which of the target's states a drafter reads; most none."""
    return tuple(getattr(drafter, "features", ()))


def num_likeliest_of(drafter: Any) -> int:
    """How many of the target's likeliest tokens a drafter asks for; most none."""
    return getattr(drafter, "num_likeliest", 0)


def embeddings_of(drafter: Any) -> Array | None:
    """What the target reads in place of ids from V on, ``[M, E]``; None for most drafters."""
    return getattr(drafter, "embeddings", None)


def reach_of(drafter: Any) -> float:
    """How many tokens in a row a drafter can guess; for most infinitely many."""
    return getattr(drafter, "reach", math.inf)


def says_how_sure(drafter: Any) -> bool:
    """Whether a drafter can be asked how sure it is of its guesses."""
    return getattr(drafter, "says_how_sure", hasattr(drafter, "extend"))


def least(limits: Iterable[int | None]) -> int | None:
    """The smallest of `limits`, None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


class Around:
    """A drafter around `draft`: it asks the target for what that asks for, and passes on what it is told."""

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
    def reach(self) -> float:
        return reach_of(self.draft)

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
    """The states that any of several drafters reads, each once."""
    return tuple(dict.fromkeys(i for part in parts for i in features_of(part)))


def told_to(part: Any, features: tuple[int, ...], told: dict[str, Any]) -> dict[str, Any]:
    """Of what a drafter of several was told, what its `part` asks for.

    Args:
        features: of the whole drafter.
    """
    mine: dict[str, Any] = {}
    if wanted := features_of(part):
        mine = {name: each for name, each in told.items() if name != "likeliest"}
        if wanted != features:
            mine["features"] = told["features"][:, :, [features.index(i) for i in wanted]]
    if (count := num_likeliest_of(part)) and "likeliest" in told:
        mine["likeliest"] = told["likeliest"][..., :count]
    return mine
