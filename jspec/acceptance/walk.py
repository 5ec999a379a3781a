# pyright: strict, reportUnknownMemberType=false
"""From node to node down a tree of guesses: which are kept, where the path ends, and what is left there."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.keys import Purpose, of_sibling, positions_from, stream, uniform
from jspec.probs import at_tokens, residual
from jspec.tree import DynamicTree, Level, Tree
from jspec.types import Draft

AnyTree = Tree | DynamicTree


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
    parents, depths = jnp.asarray(tree.parents), jnp.asarray(tree.offsets)[..., 1:]
    elder = jnp.tril(parents[..., :, None] == parents[..., None, :], -1)
    kept = kept & ~(kept[:, None, :] & elder).any(-1)
    reached = (kept[:, None, :] | ~above(tree)).all(-1)
    at_depth = reached[:, None, :] & (depths[..., None, :] == jnp.arange(1, tree.max_depth + 1)[:, None])
    path = jnp.where(at_depth, jnp.arange(1, tree.size + 1), 0).sum(-1)
    return reached.sum(-1, dtype=jnp.int32), path.astype(jnp.int32)


def end_of(num_accepted: Array, path: Array) -> Array:
    """``int32[B]``, the last node of a path, 0 where it has none."""
    before = jnp.pad(path, ((0, 0), (1, 0)))
    return jnp.take_along_axis(before, num_accepted[:, None], axis=1)[:, 0]


def kept_in_turn(uniforms: Sequence[Array], draft: Draft, target_probs: Array) -> Array:
    """Which guesses are kept if their turn comes, ``bool[B, N]``: if no elder sibling is.

    A child x with law q is kept with probability ``min(1, r(x) / q(x))``. For the eldest r is p, the target's law
    behind its parent; for the next what a refusal has left of that, ``norm(max(r - q, 0))`` (Miao et al. 2024,
    algorithm 2).
    Strict and without a division, as `count_accepted`.

    Args:
        uniforms: of every rank among siblings ``[B, max_depth]``, in [0, 1).
        draft: its tree is numbered in any order.
        target_probs: ``[B, N + 1, V]``.
    """
    tree = draft.static_tree
    kept, parents, left = jnp.zeros(draft.tokens.shape, bool), np.arange(tree.size + 1), target_probs
    for rank, noise in enumerate(uniforms):
        having = np.flatnonzero(tree.children[parents, rank] > 0)
        parents, left = parents[having], left[:, having]
        nodes = tree.children[parents, rank]
        tokens, probs = draft.tokens[:, nodes - 1], draft.probs[:, nodes - 1]
        q = at_tokens(probs, tokens)
        accepted = (q > 0) & (noise[:, tree.offsets[nodes] - 1] * q < at_tokens(left, tokens))
        kept = kept.at[:, nodes - 1].set(accepted)
        left = residual(left, probs)
    return kept


def law_behind(end: Array, draft: Draft, target_probs: Array) -> Array:
    """The law ``[B, V]`` of the token behind a path: what the refusal of all children of its ``end[B]`` leaves of p."""
    children = jnp.asarray(draft.static_tree.children)[end]
    law = jnp.take_along_axis(target_probs, end[:, None, None], axis=1)[:, 0]
    law = residual(law, jnp.zeros_like(law))
    for rank in range(draft.static_tree.max_children):
        child = children[:, rank, None, None]
        probs = jnp.take_along_axis(draft.probs, jnp.maximum(child - 1, 0), axis=1)
        law = residual(law, jnp.where(child > 0, probs, 0)[:, 0])
    return law


def is_guess(draft: Draft) -> Array:
    """``bool[B, N]``: which tokens of a draft are guesses, by themselves."""
    return at_tokens(draft.probs, draft.tokens) > 0 if draft.valid is None else draft.valid


def above(tree: AnyTree) -> Array:
    """``bool[N, N]`` or ``bool[B, N, N]``: row n has node n + 1 and the guesses before it."""
    return jnp.asarray(tree.ancestors)[..., 1:, 1:]


def length_of_prefix(kept: Array) -> Array:
    """How many of ``kept[B, K]`` are true before the first that is not."""
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
