"""Block verification, which verifies a chain as a whole."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.base import Rule
from jspec.acceptance.rejection import next_probs
from jspec.core.keys import Purpose, positions_from, stream, uniform
from jspec.core.probs import at_tokens, sample
from jspec.core.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Block(Rule):
    """Block verification (Sun et al. 2024, algorithm 2), which verifies the draft as a whole.

    The probability of accepting the first i draft tokens depends on the product of their ratios p/q. A token with a
    high ratio can thus compensate for one that was drafted too often. The expected number of accepted tokens is at
    least that of `Rejection`.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        num_draft_tokens = draft.tokens.shape[1]
        # Rejecting later draft tokens affects where the round ends, so their noise must not be reused.
        round_keys = stream(keys, start, Purpose.ACCEPT)
        uniforms = uniform(stream(round_keys, positions_from(start, num_draft_tokens), Purpose.ACCEPT))
        weights = block_weights(draft, target_probs)
        kept = uniforms < block_chances(weights, draft, target_probs)
        depths = jnp.arange(1, num_draft_tokens + 1)[None]
        num_accepted = jnp.where(kept, depths, 0).max(axis=1, initial=0).astype(jnp.int32)
        weight = jnp.take_along_axis(weights, num_accepted[:, None], axis=1)
        probs = next_probs(num_accepted, draft, target_probs, weight)
        return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), probs))


def block_weights(draft: Draft, target_probs: Array) -> Array:
    """Return ``[B, K + 1]``, the weights w_i: the share of the first i draft tokens' mass that the target can accept.

    The weights are ``w_i = min(1, w_{i-1} p/q)`` with w_0 = 1 (Sun et al. 2024, algorithm 2). They are 0 after a token
    that was not sampled from q.
    """
    p = at_tokens(target_probs[:, :-1], draft.tokens)
    q = at_tokens(draft.probs, draft.tokens)
    weights = [jnp.ones_like(target_probs[:, 0, 0])]
    for k in range(draft.tokens.shape[1]):
        mass = weights[-1] * p[:, k]
        weights.append(jnp.where(q[:, k] > 0, jnp.where(mass >= q[:, k], 1, mass / q[:, k]), 0))
    return jnp.stack(weights, axis=1)


def block_chances(weights: Array, draft: Draft, target_probs: Array) -> Array:
    """Return ``[B, K]``, the probability of accepting i = 1 .. K draft tokens if all longer prefixes are rejected.

    For i < K, this is ``l / (l + 1 - w_i)``, where ``l = sum_x max(w_i p(x) - q(x), 0)`` at the next position. For
    i = K, it is w_K (Sun et al. 2024, algorithm 2).
    """
    weight, q = weights[:, 1:-1], draft.probs[:, 1:]
    mass = weight[..., None] * target_probs[:, 1:-1]
    left = jnp.where(q > 0, jnp.maximum(mass - q, 0), mass).sum(-1)
    # If the target has no valid distribution, the text ends and the missing mass counts as remaining mass.
    left = jnp.where(mass.sum(-1) > 0, left, weight)
    chances = jnp.where(weight >= 1, 1, left / (left + 1 - weight))
    return jnp.concatenate([chances, weights[:, 1:][:, -1:]], axis=1)  # the last part is empty if K = 0
