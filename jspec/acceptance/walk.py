# pyright: strict, reportUnknownMemberType=false
"""From node to node down a tree of guesses: which are kept, where the path ends, and what is left there."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.keys import Purpose, of_sibling, positions_from, stream, uniform
from jspec.core.probs import at_tokens, residual
from jspec.core.tree import DynamicTree, Level, Tree
from jspec.core.types import Draft

AnyTree = Tree | DynamicTree
# Up to which probability a rule accepts each token, of what elder siblings have left of p, and of p: all [..., V].
Bound = Callable[[Array, Array], Array]


def whole(left: Array, p: Array) -> Array:
    """The bound of an exact rule: all that is left."""
    return left


def sibling_uniforms(keys: Array, start: Array, tree: AnyTree) -> list[Array]:
    """Of every rank among siblings ``[B, max_depth]`` in [0, 1), by depth: what guesses are judged with."""
    positions = positions_from(start, tree.max_depth)
    return [uniform(stream(of_sibling(keys, rank), positions, Purpose.ACCEPT)) for rank in range(tree.max_children)]


def at_parents(values: Array, tree: AnyTree) -> Array:
    """``[B, N, ...]``, of every guess what ``values[B, N + 1, ...]`` has at the node before it."""
    if tree.is_chain:
        return values[:, : tree.size]
    return Level(0, np.array(tree.parents) if isinstance(tree, Tree) else tree.parents).of_parents(values)


def follow(kept: Array, tree: AnyTree) -> tuple[Array, Array]:
    """The path from node 0 on along guesses that are kept; of siblings the eldest that is.

    Args:
        kept: ``bool[B, N]``.

    Returns:
        ``int32[B]``, how many nodes it has; and ``int32[B, max_depth]``, those by their depths, then 0.
    """
    parents, depths = (jnp.atleast_2d(jnp.asarray(part)) for part in (tree.parents, tree.offsets))
    elder = jnp.tril(parents[:, :, None] == parents[:, None, :], -1)
    kept = kept & ~(kept[:, None, :] & elder).any(-1)
    reached = (kept[:, None, :] | ~above(tree)).all(-1)
    at_depth = reached[:, None, :] & (depths[:, None, 1:] == jnp.arange(1, tree.max_depth + 1)[None, :, None])
    path = jnp.where(at_depth, jnp.arange(1, tree.size + 1)[None, None], 0).sum(-1)
    return reached.sum(-1, dtype=jnp.int32), path.astype(jnp.int32)


def follow_longest(kept: Array, tree: Tree) -> tuple[Array, Array]:
    """As `follow`, but of siblings the one behind which most is kept; of equal branches that of the first leaf."""
    reached = (kept[:, None, :] | ~above(tree)).all(-1)
    depths = jnp.where(reached, tree.offsets[None, 1:], 0)
    end = jnp.where(reached.any(-1), jnp.argmax(depths, axis=-1) + 1, 0)
    return jnp.asarray(tree.offsets)[end], jnp.asarray(tree.paths)[end]


def along(values: Array, path: Array) -> Array:
    """``[B, max_depth + 1, ...]``, what ``values[B, N + 1, ...]`` has at node 0 and at those of a path."""
    nodes = jnp.pad(path, ((0, 0), (1, 0)))
    return jnp.take_along_axis(values, nodes.reshape(*nodes.shape, *[1] * (values.ndim - 2)), axis=1)


def end_of(num_accepted: Array, path: Array) -> Array:
    """``int32[B]``, the last node of a path, 0 where it has none."""
    before = jnp.pad(path, ((0, 0), (1, 0)))
    return jnp.take_along_axis(before, num_accepted[:, None], axis=1)[:, 0]


def kept_in_turn(
    uniforms: Sequence[Array], draft: Draft, target_probs: Array, bound: Bound = whole
) -> tuple[Array, Array]:
    """Which guesses are kept if their turn comes, if no elder sibling is; and what that costs behind each node.

    A child x with law q is kept with probability ``min(1, b(x) / q(x))``. An exact rule has r for b: for the eldest r
    is p, the target's law behind its parent; for the next what a refusal has left of that, ``norm(max(r - a, 0))`` with
    ``a = min(q, b)`` (Miao et al. 2024, algorithm 2). Strict and without a division, as `count_accepted`.

    A larger bound is lossy. By how much the law of the token behind a node is off, in total variation, is at most the
    mean over drafts of ``sum_j prod_{i<j} (1 - min(1, b_i(x_i) / q_i(x_i))) sum_y max(a_j(y) - r_j(y), 0)``: each step
    is off by its own excess, and counts where the children before it are refused. With one child it is that excess.

    Args:
        uniforms: of every rank among siblings ``[B, max_depth]``, in [0, 1).
        draft: its tree is numbered in any order.
        target_probs: ``[B, N + 1, V]``.
        bound: b.

    Returns:
        ``bool[B, N]``, and ``[B, N + 1]``, 0 for an exact rule.
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
    """``[...]``, by how much a mass ``taken[..., V]`` goes beyond what there is: ``sum_x max(taken - left, 0)``."""
    return jnp.where(taken > left, taken - left, 0).sum(-1)


def law_behind(end: Array, draft: Draft, target_probs: Array, bound: Bound = whole) -> Array:
    """The law ``[B, V]`` of the token behind a path: what the refusal of all children of its ``end[B]`` leaves of p."""
    children = jnp.asarray(draft.static_tree.children)[end]
    p = jnp.take_along_axis(target_probs, end[:, None, None], axis=1)[:, 0]
    law = residual(p, jnp.zeros_like(p))
    for rank in range(draft.static_tree.max_children):
        child = children[:, rank, None, None]
        probs = jnp.take_along_axis(draft.probs, jnp.maximum(child - 1, 0), axis=1)
        law = residual(law, jnp.minimum(jnp.where(child > 0, probs, 0)[:, 0], bound(law, p)))
    return law


def is_guess(draft: Draft) -> Array:
    """``bool[B, N]``: which tokens of a draft are guesses, by themselves."""
    return at_tokens(draft.probs, draft.tokens) > 0 if draft.valid is None else draft.valid


def above(tree: AnyTree) -> Array:
    """Return ``bool[1, N, N]``, or ``bool[B, N, N]`` of a dynamic tree: row n has node n + 1 and its ancestors."""
    return lax.broadcast_to_rank(jnp.asarray(tree.ancestors)[..., 1:, 1:], 3)


def length_of_prefix(kept: Array) -> Array:
    """How many of ``kept[B, K]`` are true before the first that is not."""
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
