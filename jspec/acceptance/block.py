# pyright: strict, reportUnknownMemberType=false
"""Block verification: a chain is judged as a whole."""

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
    """Block verification (Sun et al. 2024, algorithm 2): the draft is judged as a whole.

    How likely the first i drafts are to be kept depends on the product of their ratios p/q, so that a good token makes
    up for one that was drafted too often. In expectation it accepts at least as many as `Rejection` does.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        num_draft_tokens = draft.tokens.shape[1]
        # That a later draft was refused has a part in where the round ends, so its noise must not be used again.
        round_keys = stream(keys, start, Purpose.ACCEPT)
        uniforms = uniform(stream(round_keys, positions_from(start, num_draft_tokens), Purpose.ACCEPT))
        weights = block_weights(draft, target_probs)
        kept = uniforms < block_chances(weights, draft, target_probs)
        depths = jnp.arange(1, num_draft_tokens + 1)[None]
        num_accepted = jnp.where(kept, depths, 0).max(axis=1, initial=0).astype(jnp.int32)
        weight = jnp.take_along_axis(weights, num_accepted[:, None], axis=1)
        law = next_probs(num_accepted, draft, target_probs, weight)
        return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), law))


def block_weights(draft: Draft, target_probs: Array) -> Array:
    """How much of the first i drafts' mass the target can take, ``[B, K + 1]``: ``w_i = min(1, w_{i-1} p/q)``, w_0 = 1.

    After Sun et al. 2024, algorithm 2. 0 behind a token that was not drawn from q.
    """
    p = at_tokens(target_probs[:, :-1], draft.tokens)
    q = at_tokens(draft.probs, draft.tokens)
    weights = [jnp.ones_like(target_probs[:, 0, 0])]
    for k in range(draft.tokens.shape[1]):
        mass = weights[-1] * p[:, k]
        weights.append(jnp.where(q[:, k] > 0, jnp.where(mass >= q[:, k], 1, mass / q[:, k]), 0))
    return jnp.stack(weights, axis=1)


def block_chances(weights: Array, draft: Draft, target_probs: Array) -> Array:
    """The chance that at least the first i drafts are kept, given that no more are, ``[B, K]`` for i = 1 .. K.

    ``l / (l + 1 - w_i)`` with ``l = sum_x max(w_i p(x) - q(x), 0)`` at the position behind them, and w_K for all K
    (Sun et al. 2024, algorithm 2).
    """
    weight, q = weights[:, 1:-1], draft.probs[:, 1:]
    mass = weight[..., None] * target_probs[:, 1:-1]
    left = jnp.where(q > 0, jnp.maximum(mass - q, 0), mass).sum(-1)
    # Where the target has no law the text ends; its missing mass counts as left.
    left = jnp.where(mass.sum(-1) > 0, left, weight)
    chances = jnp.where(weight >= 1, 1, left / (left + 1 - weight))
    return jnp.concatenate([chances, weights[:, 1:][:, -1:]], axis=1)  # the last is empty where K = 0
