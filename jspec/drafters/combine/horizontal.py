"""A combination of two drafters: the better one drafts the first tokens, and a cheaper one drafts the rest."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jspec.acceptance.path import num_guessed
from jspec.core.row_ops import write_rows
from jspec.core.sampling import add_tokens
from jspec.core.types import Draft, check_count
from jspec.drafters.base import Context, TargetView, kind_of
from jspec.drafters.capabilities import features_of, max_chain_length_of
from jspec.drafters.combine.base import Pair, PairDrafter
from jspec.drafters.drafts import as_draft, at_most


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first", "second"], meta_fields=["at"])
@dataclasses.dataclass(frozen=True)
class HorizontalDrafter(PairDrafter):
    """A drafter that drafts `at` tokens with `first` and the rest with `second`. Both may be drafters or models.

    A token counts only if all tokens before it were accepted. Later tokens are therefore worth less and should cost
    less (the horizontal cascade of Chen et al. 2024, Cascade Speculative Drafting). `second` may itself be a
    `HorizontalDrafter`.

    Attributes:
        at: the number of tokens that `first` drafts. A short draft may come from `first` alone.
    """

    at: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("at", self.at)
        if features_of(self.second):
            raise TypeError(
                f"second is of type {kind_of(self.second)}, which reads the target's hidden states, but the "
                "target has none for the tokens that first drafts; use it as first."
            )

    @property
    def max_chain_length(self) -> float:
        """The limit of `first` if it is below `at`, and otherwise `at` plus the limit of `second`."""
        first, second = map(max_chain_length_of, self.parts)
        return first if first < self.at else self.at + second

    def propose(self, state: Pair, context: Context, num_draft_tokens: int) -> tuple[Draft, Pair]:
        """Return the draft of `first`, followed by the draft of `second`.

        Neither part has read the tokens that the other part drafts.
        """
        better, cheaper = self.parts
        at = min(self.at, num_draft_tokens)
        rest = num_draft_tokens - at
        context = dataclasses.replace(context, unread=context.unread + rest)
        part_context = at_most(context, at)
        first, first_state = better.propose(state[0], part_context, at)
        first = as_draft(better, first, part_context, at)
        if not rest:
            return first, (first_state, state[1])
        later = _context_after(context, first, context.unread + at - rest)
        second, second_state = cheaper.propose(state[1], later, rest)
        second = as_draft(cheaper, second, later, rest)
        # A draft token cannot follow a token that was not drafted.
        probs = jnp.where((num_guessed(first) == at)[:, None, None], second.probs, 0)
        tokens = jnp.concatenate([first.tokens, second.tokens], axis=1)
        return Draft(tokens, jnp.concatenate([first.probs, probs], axis=1)), (first_state, second_state)


def _context_after(context: Context, draft: Draft, unread: int) -> Context:
    """Return `context` for a drafter that continues after `draft`."""
    size, counts = draft.tokens.shape[1], context.token_counts
    view = TargetView(context.target.model, context.target.cache, context.target.unread + size)
    return dataclasses.replace(
        context,
        tokens=write_rows(context.tokens, draft.tokens, context.lengths),
        lengths=context.lengths + size,
        noise=context.noise[:, size:],
        token_counts=None if counts is None else add_tokens(counts, draft.tokens, jnp.ones(draft.tokens.shape, bool)),
        target=view,
        unread=unread,
        budget=None if context.budget is None else jnp.maximum(context.budget - size, 0),
    )
