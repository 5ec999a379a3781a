"""K-SEQ, a rule with a shared bound for siblings that were sampled independently of each other."""

import dataclasses
from typing import ClassVar, cast

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.acceptance.base import Rule
from jspec.acceptance.rejection import Rejection
from jspec.acceptance.walk import at_parents, end_of, follow, is_guess, sibling_uniforms
from jspec.core.keys import Purpose, stream
from jspec.core.probs import at_tokens, residual, sample
from jspec.core.sharding import vary_like
from jspec.core.types import Draft, Verdict

# Bisection steps for rho. More steps make rho more precise. The rule is exact for any number of steps.
_STEPS = 20


@dataclasses.dataclass(frozen=True)
class KSeq(Rule):
    """K-SEQ (Sun et al. 2023, SpecTr, algorithm 3), which verifies each of a node's k children against ``p / rho``.

    ``rho`` is the smallest factor in 1 .. k at which the children together take no more than p. All siblings are thus
    verified in the same way, whereas "rejection" verifies the first child against all of p, and later children against
    the remainder. The probability of accepting one of the children is at least ``1 - 1/e`` times the highest possible
    probability (theorem 1 of the same paper).

    The children must be sampled independently, from one distribution. The rule walks down a tree node by node. On a
    chain it is the same as `Rejection`.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True
    independent: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        tree = draft.static_tree
        if tree.max_children <= 1:
            return Rejection().accept(keys, start, draft, target_probs)
        by_rank = jnp.stack(sibling_uniforms(keys, start, tree), axis=1)
        uniforms = by_rank[:, tree.sibling_ranks[1:], tree.offsets[1:] - 1]
        kept, rest = verify_siblings(uniforms, draft, target_probs)
        num_accepted, path = follow(kept, tree)
        probs = residual_at(end_of(num_accepted, path), rest, target_probs)
        return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), probs), path=path)


def verify_siblings(uniforms: Array, draft: Draft, target_probs: Array) -> tuple[Array, Array]:
    """Return which draft tokens are accepted if they are reached, and the part of p that each node's children take.

    A child x is accepted with probability ``min(1, p(x) / (rho q(x)))``. The comparison is strict and avoids division.

    Args:
        uniforms: ``[B, N]`` in [0, 1), one per draft token.
        draft: the draft. All children of a node have the same distribution, except for empty positions.
        target_probs: ``[B, N + 1, V]``.

    Returns:
        ``bool[B, N]``, and ``a (1 + r + ... + r^(k-1))`` as ``[B, N + 1, V]``. Here ``a = min(q, p / rho)`` is the part
        that one child takes, r is the probability that it is rejected, and k is the number of children.
    """
    tree = draft.static_tree
    children = tree.children
    there = (children > 0)[None] & is_guess(draft)[:, np.maximum(children - 1, 0)]
    q = jnp.zeros_like(target_probs)
    for rank in range(tree.max_children):
        probs = draft.probs[:, np.maximum(children[:, rank] - 1, 0)]
        q = jnp.where(there[:, :, rank, None], probs, q)
    p, count = jnp.where(target_probs > 0, target_probs, 0), there.sum(-1)
    factor = shared_factor(p, q, count, tree.max_children)
    ours = at_tokens(draft.probs, draft.tokens)
    share = uniforms * at_parents(factor, tree) * ours
    kept = (ours > 0) & (share < at_tokens(at_parents(target_probs, tree), draft.tokens))
    turns = expected_turns(p, q, count, factor, tree.max_children)
    return kept, jnp.minimum(q, p / factor[..., None]) * turns[..., None]


def residual_at(end: Array, taken: Array, target_probs: Array) -> Array:
    """Return the distribution ``[B, V]`` after node ``end[B]`` if none of its children is accepted: p minus `taken`."""
    p, taken = (jnp.take_along_axis(values, end[:, None, None], axis=1)[:, 0] for values in (target_probs, taken))
    return residual(p, taken)


def shared_factor(p: Array, q: Array, count: Array, most: int) -> Array:
    """Return rho, ``[...]``: the smallest factor in 1 .. k with ``1 + r + ... + r^(k-1) <= rho``.

    Here ``r = sum_x max(q - p / rho, 0)``. This is equation 5 of Sun et al. 2023, divided by the probability that a
    child is accepted, so that it also holds if that probability is 0. Bisection approaches rho from above, so that the
    part that k children take, ``min(q, p / rho) (1 + r + ...)``, is at most p.

    Args:
        p, q: ``[..., V]``, the distributions of the target and of the children.
        count: ``int[...]``, the number of children k, at most `most`.
    """

    def enough(factor: Array) -> Array:
        return expected_turns(p, q, count, factor, most) <= factor

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        below = enough(middle)
        return jnp.where(below, low, middle), jnp.where(below, middle, high)

    least = jnp.ones_like(p[..., 0])
    bounds: tuple[Array, Array] = vary_like((least, least * jnp.maximum(count, 1).astype(least.dtype)), p)
    _, found = cast(tuple[Array, Array], lax.fori_loop(0, _STEPS, halve, bounds))
    return jnp.where(enough(least), least, found)  # if p = q, a factor of 1 is enough; a larger one may not be


def expected_turns(p: Array, q: Array, count: Array, factor: Array, most: int) -> Array:
    """Return ``1 + r + ... + r^(k-1)``, the mean number of verified children. See `shared_factor`."""
    refused = jnp.maximum(q - p / factor[..., None], 0).sum(-1)  # exactly 0 for p = q, unlike 1 minus the accepted mass
    turns, power = jnp.zeros_like(refused), jnp.ones_like(refused)
    for rank in range(most):
        turns, power = turns + jnp.where(rank < count, power, 0), power * refused
    return turns
