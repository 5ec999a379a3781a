"""Coupled sampling: draft and target sample with the same noise, and draft tokens are accepted if both agree."""

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

    The target samples its tokens as in plain decoding. Draft tokens are sampled with the same noise and accepted if
    they match the target's tokens. The output is therefore the same, token for token, as that of `jspec.generate` for
    the same key, whatever the draft, its tree and K. Only rounding in the logits can change it.

    On a chain, this rule accepts fewer tokens than `Rejection`, whose coupling is optimal. If each vocabulary token had
    one random number, the acceptance rate would be at least ``(1 - d) / (1 + d)``, where d is the total variation
    distance between p and q. In jspec it may be lower, because sampling a token takes two draws
    (`jspec.core.probs.sample_with_noise`).
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = True
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        noise = target_noise(keys, positions_from(start, draft.topology.max_depth + 1), target_probs.shape[2])
        return accept_coupled(noise, draft, target_probs)


def accept_coupled(noise: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Accept the draft tokens that the target also samples with ``noise[B, max_depth + 1, 2, W]``."""
    tree = draft.topology
    if not tree.is_chain:
        depths = jnp.broadcast_to(tree.offsets, (len(noise), tree.size + 1))
        noise = jnp.take_along_axis(noise, depths[..., None, None], axis=1)
    # Sample as in plain decoding: `residual` without a draft is p, normalised, without mass at non-finite entries.
    drawn = sample_with_noise(noise, residual(target_probs, jnp.zeros_like(target_probs)))
    # A distribution without mass yields token 0, which must be rejected. So must a token with non-finite `probs`.
    kept = is_guess(draft) & (draft.tokens == at_parents(drawn, tree))
    kept &= at_tokens(at_parents(target_probs, tree), draft.tokens) > 0
    if draft.probs is not None:
        kept &= at_tokens(draft.probs, draft.tokens) < jnp.inf
    if tree.is_chain:
        end = length_of_prefix(kept)
        return Verdict(end, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0])
    # Accepted siblings hold the same token. If several drafters drafted this token, one sibling's branch may be longer
    # than the others.
    num_accepted, path = follow_longest(kept, tree) if isinstance(tree, Tree) else follow(kept, tree)
    end = end_of(num_accepted, path)
    return Verdict(num_accepted, jnp.take_along_axis(drawn, end[:, None], axis=1)[:, 0], path=path)
