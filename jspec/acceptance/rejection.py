"""Speculative sampling, which verifies a chain token by token and a tree's siblings one after another."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.base import Rule
from jspec.acceptance.walk import (
    Bound,
    along,
    end_of,
    follow,
    kept_in_turn,
    length_of_prefix,
    next_probs_at,
    sibling_uniforms,
    whole,
)
from jspec.core.keys import Purpose, positions_from, stream, uniform
from jspec.core.probs import at_tokens, residual, sample
from jspec.core.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Rejection(Rule):
    """Speculative sampling, token by token (Leviathan et al. 2023, section 2.3; Chen et al. 2023, algorithm 2).

    If a node has several children, the first child is verified first. If it is rejected, the next child is verified
    against the remaining target probability, and so on (Miao et al. 2024, SpecInfer, algorithm 2). This is exact if
    each child was sampled from its distribution given its earlier siblings. The proof is by induction from the last
    child: each step is speculative sampling from the remaining probability.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        if draft.topology.is_chain:
            return accept_tokens(keys, start, draft, target_probs, target_probs[:, :-1])
        return accept_nodes(keys, start, draft, target_probs)


def accept_tokens(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Array) -> Verdict:
    """Accept tokens in order, each token x with probability ``min(1, bound(x) / q(x))``, until the first rejection.

    The next token is sampled from what remains of p after the accepted mass ``min(q, bound)`` is subtracted. If the
    bound is p, this is speculative sampling. A larger bound at any token makes the rule lossy.

    Args:
        keys, start, draft, target_probs: same as in `Rule.accept`.
        bound: ``float32[B, K, V]``, the bound for every token at each position.
    """
    uniforms = uniform(stream(keys, positions_from(start, draft.tokens.shape[1]), Purpose.ACCEPT))
    num_accepted = count_accepted(uniforms, draft, bound)
    accepted = Draft(draft.tokens, jnp.minimum(draft.probs, bound))
    probs = next_probs(num_accepted, accepted, target_probs)
    return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), probs))


def accept_nodes(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Bound = whole) -> Verdict:
    """Accept tree nodes, verifying children in turn, and sample the token after the path.

    If `bound` makes the rule lossy, the verdict has the distortion of `kept_in_turn`.
    """
    tree = draft.static_tree
    kept, distortion = kept_in_turn(sibling_uniforms(keys, start, tree), draft, target_probs, bound)
    num_accepted, path = follow(kept, tree)
    probs = next_probs_at(end_of(num_accepted, path), draft, target_probs, bound)
    token = sample(stream(keys, start + num_accepted, Purpose.TARGET), probs)
    return Verdict(num_accepted, token, None if bound is whole else along(distortion, path), path)


def count_accepted(uniforms: Array, draft: Draft, bound: Array) -> Array:
    """Count the accepted tokens, each accepted with probability ``min(1, bound(x) / q(x))``, until the first rejection.

    This is algorithm 1 of Leviathan et al. 2023. The test is ``u q < p``, which avoids division. It is strict, so that
    a token with p = 0 is never accepted, even at u = 0. A token with q = 0 or NaN was not sampled from q and is
    rejected.

    Args:
        uniforms: ``[B, K]`` in [0, 1).
        draft: tokens ``[B, K]`` and their distributions ``[B, K, V]``.
        bound: ``[B, K, V]``; p for an exact rule.

    Returns:
        ``int32[B]`` in 0..K.
    """
    q = at_tokens(draft.probs, draft.tokens)
    return length_of_prefix((q > 0) & (uniforms * q < at_tokens(bound, draft.tokens)))


def next_probs(num_accepted: Array, draft: Draft, target_probs: Array, weight: Array | None = None) -> Array:
    """Return ``[B, V]``, the distribution of the token after the accepted prefix.

    After a rejection, it is the residual of p (times ``weight[B, 1]``, if given) and q. After K acceptances, it is p
    itself, the residual without a draft.
    """
    draft_probs = jnp.pad(draft.probs, ((0, 0), (0, 1), (0, 0)))
    at = num_accepted[:, None, None]
    p = jnp.take_along_axis(target_probs, at, axis=1)[:, 0]
    q = jnp.take_along_axis(draft_probs, at, axis=1)[:, 0]
    return residual(p if weight is None else weight * p, q)
