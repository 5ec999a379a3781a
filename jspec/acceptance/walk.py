"""The walk down a draft tree: the accepted nodes, the end of the path, and the remaining probability there."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.keys import Purpose, of_sibling, positions_from, stream, uniform
from jspec.core.probs import at_tokens, residual
from jspec.core.tree import DynamicTree, Level, Tree
from jspec.core.types import Draft

AnyTree = Tree | DynamicTree
# A function that returns the bound up to which a rule accepts each token. Its arguments are the part of p that earlier
# siblings left, and p. All arrays are [..., V].
Bound = Callable[[Array, Array], Array]


def whole(left: Array, p: Array) -> Array:
    """Return the bound of an exact rule: all of the remaining probability."""
    return left


def sibling_uniforms(keys: Array, start: Array, tree: AnyTree) -> list[Array]:
    """Return the random numbers for verification: for each sibling rank, ``[B, max_depth]`` in [0, 1), by depth."""
    positions = positions_from(start, tree.max_depth)
    return [uniform(stream(of_sibling(keys, rank), positions, Purpose.ACCEPT)) for rank in range(tree.max_children)]


def at_parents(values: Array, tree: AnyTree) -> Array:
    """Return ``[B, N, ...]``, the entry of ``values[B, N + 1, ...]`` at the parent of every draft token."""
    if tree.is_chain:
        return values[:, : tree.size]
    return Level(0, np.array(tree.parents) if isinstance(tree, Tree) else tree.parents).of_parents(values)


def follow(kept: Array, tree: AnyTree) -> tuple[Array, Array]:
    """Follow the accepted draft tokens from node 0, taking the first accepted sibling at each depth.

    Args:
        kept: ``bool[B, N]``, whether each draft token is accepted.

    Returns:
        ``int32[B]``, the number of nodes on the path, and ``int32[B, max_depth]``, its nodes by depth, padded with 0.
    """
    parents, depths = (jnp.atleast_2d(jnp.asarray(part)) for part in (tree.parents, tree.offsets))
    elder = jnp.tril(parents[:, :, None] == parents[:, None, :], -1)
    kept = kept & ~(kept[:, None, :] & elder).any(-1)
    reached = (kept[:, None, :] | ~above(tree)).all(-1)
    at_depth = reached[:, None, :] & (depths[:, None, 1:] == jnp.arange(1, tree.max_depth + 1)[None, :, None])
    path = jnp.where(at_depth, jnp.arange(1, tree.size + 1)[None, None], 0).sum(-1)
    return reached.sum(-1, dtype=jnp.int32), path.astype(jnp.int32)


def follow_longest(kept: Array, tree: Tree) -> tuple[Array, Array]:
    """Follow the longest branch of accepted tokens, and return it as `follow` does. Ties go to the first leaf."""
    reached = (kept[:, None, :] | ~above(tree)).all(-1)
    depths = jnp.where(reached, tree.offsets[None, 1:], 0)
    end = jnp.where(reached.any(-1), jnp.argmax(depths, axis=-1) + 1, 0)
    return jnp.asarray(tree.offsets)[end], jnp.asarray(tree.paths)[end]


def along(values: Array, path: Array) -> Array:
    """Return ``[B, max_depth + 1, ...]``, the entries of ``values[B, N + 1, ...]`` at node 0 and a path's nodes."""
    nodes = jnp.pad(path, ((0, 0), (1, 0)))
    return jnp.take_along_axis(values, nodes.reshape(*nodes.shape, *[1] * (values.ndim - 2)), axis=1)


def end_of(num_accepted: Array, path: Array) -> Array:
    """Return ``int32[B]``, the last node of a path, or 0 if it is empty."""
    before = jnp.pad(path, ((0, 0), (1, 0)))
    return jnp.take_along_axis(before, num_accepted[:, None], axis=1)[:, 0]


def kept_in_turn(
    uniforms: Sequence[Array], draft: Draft, target_probs: Array, bound: Bound = whole
) -> tuple[Array, Array]:
    """Return which draft tokens are accepted if no earlier sibling is accepted, and the distortion after each node.

    A child x with distribution q is accepted with probability ``min(1, b(x) / q(x))``. For an exact rule, b is r. For
    the first child, r is p, the target's distribution after its parent. For each later child, r becomes the residual
    after the rejection, ``norm(max(r - a, 0))`` with ``a = min(q, b)`` (Miao et al. 2024, algorithm 2). The comparison
    is strict and avoids division, as in `count_accepted`.

    A larger bound makes the rule lossy. For the token after a node, the total variation distance from the target is
    then at most the mean, over drafts, of
    ``sum_j prod_{i<j} (1 - min(1, b_i(x_i) / q_i(x_i))) sum_y max(a_j(y) - r_j(y), 0)``. Each child contributes its own
    excess, which counts only if the children before it are rejected. With one child, the distance equals that excess.

    Args:
        uniforms: ``[B, max_depth]`` in [0, 1) for each sibling rank.
        draft: the draft, whose tree may be numbered in any order.
        target_probs: ``[B, N + 1, V]``.
        bound: b.

    Returns:
        ``bool[B, N]``, and the distortion ``[B, N + 1]``, which is 0 for an exact rule.
    """
    tree = draft.static_tree
    kept, distortion = jnp.zeros(draft.tokens.shape, bool), jnp.zeros_like(target_probs[..., 0])
    parents, p, left, turn = np.arange(tree.size + 1), target_probs, target_probs, jnp.ones_like(distortion)
    for rank, noise in enumerate(uniforms):
        having = np.flatnonzero(tree.children[parents, rank] > 0)
        parents, p, left, turn = parents[having], p[:, having], left[:, having], turn[:, having]
        nodes = tree.children[parents, rank]
        tokens, probs, limit = draft.tokens[:, nodes - 1], draft.probs[:, nodes - 1], bound(left, p)
        q, most = at_tokens(probs, tokens), at_tokens(limit, tokens)
        kept = kept.at[:, nodes - 1].set((q > 0) & (noise[:, tree.offsets[nodes] - 1] * q < most))
        taken = jnp.minimum(probs, limit)
        distortion = distortion.at[:, parents].add(turn * excess(taken, left))
        turn = turn * jnp.where(q > 0, 1 - jnp.minimum(most / jnp.where(q > 0, q, 1), 1), 1)
        left = residual(left, taken)
    return kept, distortion


def excess(taken: Array, left: Array) -> Array:
    """Return ``[...]``, the mass by which ``taken[..., V]`` exceeds `left`: ``sum_x max(taken - left, 0)``."""
    return jnp.where(taken > left, taken - left, 0).sum(-1)


def next_probs_at(end: Array, draft: Draft, target_probs: Array, bound: Bound = whole) -> Array:
    """Return the distribution ``[B, V]`` that remains if all children of a path's last node ``end[B]`` are rejected."""
    children = jnp.asarray(draft.static_tree.children)[end]
    p = jnp.take_along_axis(target_probs, end[:, None, None], axis=1)[:, 0]
    remaining = residual(p, jnp.zeros_like(p))
    for rank in range(draft.static_tree.max_children):
        child = children[:, rank, None, None]
        probs = jnp.take_along_axis(draft.probs, jnp.maximum(child - 1, 0), axis=1)
        remaining = residual(remaining, jnp.minimum(jnp.where(child > 0, probs, 0)[:, 0], bound(remaining, p)))
    return remaining


def is_guess(draft: Draft) -> Array:
    """Return ``bool[B, N]``: which positions of a draft hold a token, regardless of the positions before them."""
    return at_tokens(draft.probs, draft.tokens) > 0 if draft.valid is None else draft.valid


def above(tree: AnyTree) -> Array:
    """Return ``bool[1, N, N]``, or ``bool[B, N, N]`` for a dynamic tree: row n marks node n + 1 and its ancestors."""
    return lax.broadcast_to_rank(jnp.asarray(tree.ancestors)[..., 1:, 1:], 3)


def length_of_prefix(kept: Array) -> Array:
    """Count the true entries of ``kept[B, K]`` before the first false one."""
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
