"""Two drafters, one of them for the rows in which the other has no guess."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Context
from jspec.drafters.model import as_drafter
from jspec.types import Draft, Verdict, pytree


@pytree
class FallbackDrafter:
    """Drafts with `first` where it has a guess for the next token, else with `second`; drafters or models.

    Both run every round.
    """

    first: Any
    second: Any

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            object.__setattr__(self, name, as_drafter(getattr(self, name)))

    @property
    def vocab_size(self) -> int | None:
        """That of the two, if they agree."""
        sizes = {part.vocab_size for part in (self.first, self.second)} - {None}
        if len(sizes) > 1:
            raise ValueError(f"FallbackDrafter combines vocabularies of {' and '.join(map(str, sorted(sizes)))} "
                             "tokens; use drafters that share the target's tokenizer.")  # fmt: skip
        return next(iter(sizes), None)

    @property
    def max_positions(self) -> int | None:
        """The smaller of the two."""
        limits = (getattr(part, "max_positions", None) for part in (self.first, self.second))
        return min((limit for limit in limits if limit is not None), default=None)

    def init(self, tokens: Array, num_slots: int) -> tuple[Any, Any]:
        return self.first.init(tokens, num_slots), self.second.init(tokens, num_slots)

    def propose(self, state: tuple[Any, Any], context: Context, num_draft_tokens: int) -> tuple[Draft, tuple[Any, Any]]:
        """Row by row the one draft or the other. What a round commits, one of the two may never have read."""
        context = dataclasses.replace(context, unread=context.unread + num_draft_tokens - 1)
        first, first_state = self.first.propose(state[0], context, num_draft_tokens)
        second, second_state = self.second.propose(state[1], context, num_draft_tokens)
        guessed = first.probs[:, 0].sum(-1) > 0

        def pick(a: Array, b: Array) -> Array:
            return jnp.where(guessed.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, first, second), (first_state, second_state)

    def commit(self, state: tuple[Any, Any], draft: Draft, verdict: Verdict, hidden: Array) -> tuple[Any, Any]:
        """Both see the draft that was judged, whoever made it."""
        return tuple(
            part.commit(old, draft, verdict, hidden) for part, old in zip((self.first, self.second), state, strict=True)
        )
