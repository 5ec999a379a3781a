# pyright: strict, reportUnknownMemberType=false
"""Coupling: drafts and the target's own tokens are drawn with one noise, and kept where they agree."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.base import Rule
from jspec.acceptance.walk import at_parents, end_of, follow, follow_longest, is_guess, length_of_prefix
from jspec.core.keys import positions_from, target_noise
from jspec.core.probs import at_tokens, residual, sample_with_noise
from jspec.core.tree import Tree
from jspec.core.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Coupled(Rule):
    """The target draws its tokens as in plain decoding; drafts, drawn with the same noise, are kept where they agree.

    So the text is the one that `jspec.generate` gives for the same key, token for token, whatever the draft, its tree
    and K, but for rounding in the logits: a Gumbel coupling (Daliri, Musco and Suresh 2025). Of a chain it accepts less
    than `Rejection`, whose coupling is optimal: with one number a token at least ``(1 - d) / (1 + d)``, d being the
    total variation distance of p and q, and here, where a token takes two draws, it may be less
    (`jspec.core.probs.sample_with_noise`).
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        noise = target_noise(keys, positions_from(start, draft.topology.max_depth + 1), target_probs.shape[2])
        return accept_coupled(noise, draft, target_probs)


def accept_coupled(noise: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Keep the drafts that are the tokens which ``noise[B, max_depth + 1, 2, W]`` draws from the target's laws."""
    tree = draft.topology
    if not tree.is_chain:
        depths = jnp.broadcast_to(tree.offsets, (len(noise), tree.size + 1))
        noise = jnp.take_along_axis(noise, depths[..., None, None], axis=1)
    # `residual` of no draft is what plain decoding draws from: p, normalised, and nothing where p is not finite.
    drawn = sample_with_noise(noise, residual(target_probs, jnp.zeros_like(target_probs)))
    # A law without mass draws token 0, which may not be written; and a draft's token may not come from its law.
    kept = is_guess(draft) & (draft.tokens == at_parents(drawn, tree))
    kept &= at_tokens(at_parents(target_probs, tree), draft.tokens) > 0
    if draft.probs is not None:
        kept &= at_tokens(draft.probs, draft.tokens) < jnp.inf
    if tree.is_chain:
        end = length_of_prefix(kept)
        return Verdict(end, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0])
    # Siblings that are kept are the same token; where they come from several drafters, one's branch may go on.
    num_accepted, path = follow_longest(kept, tree) if isinstance(tree, Tree) else follow(kept, tree)
    end = end_of(num_accepted, path)
    return Verdict(num_accepted, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0], path=path)
