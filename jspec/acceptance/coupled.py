# pyright: strict, reportUnknownMemberType=false
"""Coupling: drafts and the target's own tokens are sampled with the same noise, and accepted if they agree."""

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
    """A Gumbel coupling of draft and target (Daliri, Musco and Suresh 2025).

    The target samples its tokens as in plain decoding. Drafts are sampled with the same noise and accepted if they
    agree. The text is therefore, token for token, that of `jspec.generate` for the same key, whatever the draft, its
    tree and K. Only rounding in the logits can change it.

    On a chain it accepts less than `Rejection`, whose coupling is optimal. With one number per token the acceptance
    rate is at least ``(1 - d) / (1 + d)``, with d the total variation distance of p and q. It may be less in jspec,
    because a token takes two draws (`jspec.core.probs.sample_with_noise`).
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        noise = target_noise(keys, positions_from(start, draft.topology.max_depth + 1), target_probs.shape[2])
        return accept_coupled(noise, draft, target_probs)


def accept_coupled(noise: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Accept the draft tokens that ``noise[B, max_depth + 1, 2, W]`` samples from the target's distributions."""
    tree = draft.topology
    if not tree.is_chain:
        depths = jnp.broadcast_to(tree.offsets, (len(noise), tree.size + 1))
        noise = jnp.take_along_axis(noise, depths[..., None, None], axis=1)
    # Plain decoding samples from `residual` without a draft: p, normalised, without mass at non-finite entries of p.
    drawn = sample_with_noise(noise, residual(target_probs, jnp.zeros_like(target_probs)))
    # A distribution without mass gives token 0, which must not be written. A draft token may not come from its `probs`.
    kept = is_guess(draft) & (draft.tokens == at_parents(drawn, tree))
    kept &= at_tokens(at_parents(target_probs, tree), draft.tokens) > 0
    if draft.probs is not None:
        kept &= at_tokens(draft.probs, draft.tokens) < jnp.inf
    if tree.is_chain:
        end = length_of_prefix(kept)
        return Verdict(end, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0])
    # Accepted siblings are the same token. If several drafters drafted them, the branch of one may go on.
    num_accepted, path = follow_longest(kept, tree) if isinstance(tree, Tree) else follow(kept, tree)
    end = end_of(num_accepted, path)
    return Verdict(num_accepted, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0], path=path)
