"""A combination of two drafters: the second one drafts in rows where the first one proposes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.types import Draft, pytree
from jspec.drafters.base import Context, Drafter, DraftSource, State, kind_of
from jspec.drafters.capabilities import has_confidence, max_chain_length_of
from jspec.drafters.combine.base import Pair, PairDrafter
from jspec.drafters.drafts import as_draft, at_most
from jspec.drafters.standalone.ngram import NGramDrafter


@pytree
class FallbackDrafter(PairDrafter):
    """A drafter that uses `first` if it proposes a next token, and otherwise `second`. Both may be drafters or models.

    Both parts run in every round, each up to its `max_chain_length`. If draft lengths vary
    (`jspec.drafters.draft_length`), `second` drafts nothing in rows where `first` proposes a token.
    """

    @property
    def max_chain_length(self) -> float:
        """The number of consecutive tokens that at least one part can draft."""
        return max(map(max_chain_length_of, self.parts))

    @property
    def has_confidence(self) -> bool:
        """Whether at least one part reports its confidence. The other part drafts as many tokens as it can."""
        return any(map(has_confidence, self.parts))

    def propose(self, state: Pair, context: Context, num_draft_tokens: int) -> tuple[Draft, Pair]:
        """Return one part's draft for each row.

        The other part may never have read the tokens that a round commits.
        """
        context = dataclasses.replace(context, unread=context.unread + num_draft_tokens - 1)
        one, other = self.parts
        first, first_state = _propose_padded(one, state[0], context, num_draft_tokens)
        guessed = first.probs[:, 0].sum(-1) > 0
        if context.budget is not None:
            context = dataclasses.replace(context, budget=jnp.where(guessed, 0, context.budget))
        second, second_state = _propose_padded(other, state[1], context, num_draft_tokens)

        def pick(a: Array, b: Array) -> Array:
            return jnp.where(guessed.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return jax.tree.map(pick, first, second), (first_state, second_state)


def with_lookup_first(drafter: DraftSource) -> FallbackDrafter:
    """Return a prompt-lookup drafter that matches two or three tokens, with `drafter` as its fallback.

    Matches of that length are rarely due to chance.
    """
    return FallbackDrafter(NGramDrafter(3, 2), drafter)


def _propose_padded(part: Drafter[State], state: State, context: Context, num_draft_tokens: int) -> tuple[Draft, State]:
    """Return the draft of `part`, padded with empty positions after its `max_chain_length`, and the part's state."""
    count = int(min(num_draft_tokens, part.max_chain_length))
    part_context = at_most(context, count)
    if not has_confidence(part):  # a part of this part could otherwise decide from its own tokens alone
        part_context = dataclasses.replace(part_context, draft_length=None)
    draft, state = part.propose(state, part_context, count)
    draft, missing = as_draft(part, draft, part_context, count), num_draft_tokens - count
    if draft.probs is None:
        raise ValueError(
            f"{kind_of(part)} drafts tokens without distributions, but a FallbackDrafter needs them to "
            "choose between its parts; set probs in the drafts."
        )
    tokens = jnp.pad(draft.tokens, ((0, 0), (0, missing)))
    return Draft(tokens, jnp.pad(draft.probs, ((0, 0), (0, missing), (0, 0)))), state
