# pyright: strict, reportUnknownMemberType=false
"""Two drafters, one of them for the rows in which the other has no guess."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.types import Draft, pytree
from jspec.drafters.base import Context, as_draft, at_most
from jspec.drafters.capabilities import reach_of, says_how_sure
from jspec.drafters.combine.base import Duo
from jspec.drafters.standalone.ngram import NGramDrafter


@pytree
class FallbackDrafter(Duo):
    """Drafts with `first` where it has a guess for the next token, else with `second`; drafters or models.

    Both run every round, each as far as it reaches; where drafts vary in length (`jspec.drafters.draft_length`)
    `second` drafts nothing in rows that `first` has guessed.
    """

    @property
    def reach(self) -> float:
        """How many tokens in a row one of them can guess."""
        return max(map(reach_of, self.parts))

    @property
    def says_how_sure(self) -> bool:
        """Whether one of them does; where the other drafts, its guesses are as many as it has."""
        return any(map(says_how_sure, self.parts))

    def propose(self, state: tuple[Any, Any], context: Context, num_draft_tokens: int) -> tuple[Draft, tuple[Any, Any]]:
        """Row by row the one draft or the other. What a round commits, one of the two may never have read."""
        context = dataclasses.replace(context, unread=context.unread + num_draft_tokens - 1)
        first, first_state = _asked(self.first, state[0], context, num_draft_tokens)
        guessed = first.probs[:, 0].sum(-1) > 0
        if context.budget is not None:
            context = dataclasses.replace(context, budget=jnp.where(guessed, 0, context.budget))
        second, second_state = _asked(self.second, state[1], context, num_draft_tokens)

        def pick(a: Array, b: Array) -> Array:
            return jnp.where(guessed.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, first, second), (first_state, second_state)


def behind_lookup(drafter: Any) -> FallbackDrafter:
    """Lookup of two or three tokens, which are seldom the same by chance, and `drafter` where there are none."""
    return FallbackDrafter(NGramDrafter(3, 2), drafter)


def _asked(part: Any, state: Any, context: Context, num_draft_tokens: int) -> tuple[Draft, Any]:
    """What `part` drafts as far as it reaches, with tokens behind it that are no guesses; and its state."""
    count = int(min(num_draft_tokens, reach_of(part)))
    asked = at_most(context, count)
    draft, state = part.propose(state, asked, count)
    draft, missing = as_draft(part, draft, asked, count), num_draft_tokens - count
    if draft.probs is None:
        raise ValueError(f"{type(part).__name__} drafts tokens without their laws, and a FallbackDrafter tells by laws "
                         "which part has a guess; give probs.")  # fmt: skip
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, missing)))
    return Draft(tokens, jnp.pad(draft.probs, ((0, 0), (0, missing), (0, 0)))), state
