"""From node to node down a tree of guesses: which are kept, where the path ends, and what is left there."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.probs import at_tokens, residual
from jspec.tree import DynamicTree, Level, Tree
from jspec.types import Draft, Verdict

AnyTree = Tree | DynamicTree


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
    reached = (kept[:, None, :] | ~_above(tree)).all(-1)
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
    Strict and without a division, as `jspec.accept.count_accepted`.

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


def traverse(uniforms: Array, draft: Draft, target_probs: Array) -> tuple[Array, Array]:
    """Where traversal verification ends, ``int32[B]``, and the law ``[B, V]`` of the token behind it.

    Nodes are judged after all that is below them. A node has a weight w, how much of its branch's mass the target can
    take, and p, what is left of the target's law behind it. Each child x with law q gets the weight
    ``min(1, w p(x) / q(x))``; where nothing below it is kept, z = ``max(w p - q, 0)`` is left, of mass s, so that p is
    ``z / s`` and w is ``s / (s + 1 - w)``. In the end the node is kept with probability w, node 0 always (Weng et al.
    2025, algorithm 3).

    Args:
        uniforms: ``[B, N]`` in [0, 1), one a node.
        draft, target_probs: as for `kept_in_turn`.
    """
    tree, batch = draft.static_tree, len(draft.tokens)
    end, behind, done = jnp.zeros(batch, jnp.int32), jnp.zeros_like(target_probs[:, 0]), jnp.zeros(batch, bool)

    def visit(node: int, weight: Array) -> None:
        nonlocal end, behind, done
        law = residual(target_probs[:, node], jnp.zeros_like(behind))
        for child in tree.children[node][tree.children[node] > 0]:
            token, probs = draft.tokens[:, child - 1], draft.probs[:, child - 1]
            p, q = weight * at_tokens(law, token), at_tokens(probs, token)
            visit(int(child), jnp.where(q > 0, jnp.where(p >= q, 1, p / jnp.where(q > 0, q, 1)), 0))
            mass = weight[:, None] * law
            left = jnp.where(probs > 0, jnp.maximum(mass - probs, 0), mass).sum(-1)
            # Where the target has no law the text ends; its missing mass counts as left.
            left = jnp.where(mass.sum(-1) > 0, left, weight)
            law = residual(mass, probs)
            weight = jnp.where(weight >= 1, 1, left / (left + 1 - weight))
        kept = ~done & (uniforms[:, node - 1] < weight if node else True)
        end, behind, done = jnp.where(kept, node, end), jnp.where(kept[:, None], law, behind), done | kept

    visit(0, jnp.ones(batch, target_probs.dtype))
    return end, behind


class Path(NamedTuple):
    """What a round goes along: the accepted guesses and the token behind them; of a tree one branch of it.

    Attributes:
        tokens: ``int32[B, K + 1]``, the accepted ones, that behind them, then anything. K is the draft's depth.
        target_probs: ``float32[B, K + 1, V]``, the target's laws of those.
        num_guessed: ``int32[B]``, how many of the tokens were guessed, a refused guess for the last one included.
        guesses: ``int32[B, K + 1]``, how many guesses the draft has down to each depth.
    """

    tokens: Array
    target_probs: Array
    num_guessed: Array
    guesses: Array


def along_path(draft: Draft, verdict: Verdict, target_probs: Array) -> Path:
    """The path that a verdict has found."""
    tree = draft.topology
    if verdict.path is None:
        guessed, tokens = num_guessed(draft), draft.tokens
        guesses = jnp.minimum(guessed[:, None], jnp.arange(tree.size + 1, dtype=jnp.int32))
    else:
        path, guess = verdict.path, _whole_branches(draft)
        tokens = jnp.take_along_axis(draft.tokens, jnp.maximum(path - 1, 0), axis=1)
        target_probs = jnp.take_along_axis(target_probs, jnp.pad(path, ((0, 0), (1, 0)))[..., None], axis=1)
        end = end_of(verdict.num_accepted, path)
        guessed = verdict.num_accepted + (guess & (jnp.asarray(tree.parents) == end[:, None])).any(1)
        down_to = jnp.asarray(tree.offsets)[..., None, 1:] <= jnp.arange(tree.max_depth + 1)[:, None]
        guesses = (guess[:, None, :] & down_to).sum(-1, dtype=jnp.int32)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1)))
    follows = jnp.arange(tokens.shape[1]) == verdict.num_accepted[:, None]
    return Path(jnp.where(follows, verdict.next_token[:, None], tokens), target_probs, guessed, guesses)


def num_guessed(draft: Draft) -> Array:
    """How many tokens of a chain come before one that is no guess, ``int32[B]``."""
    return length_of_prefix(is_guess(draft))


def is_guess(draft: Draft) -> Array:
    """``bool[B, N]``: which tokens of a draft are guesses, by themselves."""
    return at_tokens(draft.probs, draft.tokens) > 0 if draft.valid is None else draft.valid


def _whole_branches(draft: Draft) -> Array:
    """``bool[B, N]``: the nodes of a tree that are guesses, and so is all before them."""
    return (is_guess(draft)[:, None, :] | ~_above(draft.topology)).all(-1)


def _above(tree: AnyTree) -> Array:
    """``bool[N, N]`` or ``bool[B, N, N]``: row n has node n + 1 and the guesses before it."""
    return jnp.asarray(tree.ancestors)[..., 1:, 1:]


def length_of_prefix(kept: Array) -> Array:
    """How many of ``kept[B, K]`` are true before the first that is not."""
    return jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
