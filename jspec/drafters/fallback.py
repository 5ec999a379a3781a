# pyright: strict, reportUnknownMemberType=false
"""Two drafters, one of them for the rows in which the other has no guess."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Context, as_draft
from jspec.drafters.duo import Duo
from jspec.types import Draft, pytree


@pytree
class FallbackDrafter(Duo):
    """Drafts with `first` where it has a guess for the next token, else with `second`; drafters or models.

    Both run every round.
    """

    def propose(self, state: tuple[Any, Any], context: Context, num_draft_tokens: int) -> tuple[Draft, tuple[Any, Any]]:
        """Row by row the one draft or the other. What a round commits, one of the two may never have read."""
        context = dataclasses.replace(context, unread=context.unread + num_draft_tokens - 1)
        first, first_state = self.first.propose(state[0], context, num_draft_tokens)
        second, second_state = self.second.propose(state[1], context, num_draft_tokens)
        first = as_draft(self.first, first, context, num_draft_tokens)
        second = as_draft(self.second, second, context, num_draft_tokens)
        guessed = first.probs[:, 0].sum(-1) > 0

        def pick(a: Array, b: Array) -> Array:
            return jnp.where(guessed.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, first, second), (first_state, second_state)
