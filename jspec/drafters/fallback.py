# pyright: strict, reportUnknownMemberType=false
"""Two drafters, one of them for the rows in which the other has no guess."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.asked import reach_of, says_how_sure
from jspec.drafters.base import Context, as_draft, at_most
from jspec.drafters.duo import Duo
from jspec.types import Draft, check_count


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=["second_reach"])
@dataclasses.dataclass(frozen=True)
class FallbackDrafter(Duo):
    """Drafts with `first` where it has a guess for the next token, else with `second`; drafters or models.

    Both run every round, each as far as it reaches.

    Attributes:
        second_reach: how many tokens `second` drafts at most: what looks up guesses many tokens at no cost, and a model
            pays for each. ``jspec.UpTo(K, (second_reach,))`` verifies no more than those. None for no limit.
    """

    second_reach: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.second_reach is not None:
            check_count("second_reach", self.second_reach)

    @property
    def reach(self) -> float:
        """How many tokens in a row one of them can guess."""
        return max(self._reaches)

    @property
    def says_how_sure(self) -> bool:
        """Whether one of them does; where the other drafts, its guesses are as many as it has."""
        return any(map(says_how_sure, self.parts))

    @property
    def _reaches(self) -> tuple[float, float]:
        second = reach_of(self.second)
        return reach_of(self.first), second if self.second_reach is None else min(second, self.second_reach)

    def propose(self, state: tuple[Any, Any], context: Context, num_draft_tokens: int) -> tuple[Draft, tuple[Any, Any]]:
        """Row by row the one draft or the other. What a round commits, one of the two may never have read."""
        context = dataclasses.replace(context, unread=context.unread + num_draft_tokens - 1)
        drafts, states = list[Draft](), list[Any]()
        for part, own, reach in zip(self.parts, state, self._reaches, strict=True):
            count = int(min(num_draft_tokens, reach))
            asked = at_most(context, count)
            draft, own = part.propose(own, asked, count)
            drafts.append(_padded(as_draft(part, draft, asked, count), num_draft_tokens))
            states.append(own)
        guessed = drafts[0].probs[:, 0].sum(-1) > 0

        def pick(a: Array, b: Array) -> Array:
            return jnp.where(guessed.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, *drafts), (states[0], states[1])


def _padded(draft: Draft, size: int) -> Draft:
    """A chain with tokens behind it that are no guesses."""
    missing = size - draft.tokens.shape[1]
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, missing)))
    return Draft(tokens, jnp.pad(draft.probs, ((0, 0), (0, missing), (0, 0))))
