"""Traversal verification, which verifies a tree as a whole."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.base import Rule
from jspec.acceptance.block import Block
from jspec.core.keys import Purpose, of_sibling, positions_from, stream, uniform
from jspec.core.probs import at_tokens, residual, sample
from jspec.core.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Traversal(Rule):
    """Traversal verification (Weng et al. 2025, algorithm 3), which verifies a tree as a whole, from leaves to root.

    On a chain, it is the same as `Block`. In a tree, it can accept a branch that `Rejection` abandons at its first
    nodes, if the whole branch is likely enough.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        tree = draft.static_tree
        if tree.is_chain:
            return Block().accept(keys, start, draft, target_probs)
        # The round has its own key, as in `Block`. Cousins are verified side by side, so each has its own noise.
        round_keys = stream(keys, start, Purpose.ACCEPT)
        depths, rank = tree.offsets[1:], tree.rank_at_depth[1:]
        by_rank = [
            stream(of_sibling(round_keys, r), positions_from(start, tree.max_depth), Purpose.ACCEPT)
            for r in range(rank.max() + 1)
        ]
        uniforms = jnp.stack([uniform(keys) for keys in by_rank], axis=1)[:, rank, depths - 1]
        end, remaining = traverse(uniforms, draft, target_probs)
        num_accepted, path = jnp.asarray(tree.offsets)[end], jnp.asarray(tree.paths)[end]
        return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), remaining), path=path)


def traverse(uniforms: Array, draft: Draft, target_probs: Array) -> tuple[Array, Array]:
    """Return the node where traversal verification ends, ``int32[B]``, and the distribution ``[B, V]`` after it.

    Each node is verified after all nodes below it. A node has a weight w, the share of its branch's mass that the
    target can accept. It also has p, the remaining part of the target's distribution after the node. Each child x with
    distribution q gets the weight ``min(1, w p(x) / q(x))``. If neither the child nor any node below it is accepted,
    ``z = max(w p - q, 0)`` remains, with mass s. Then p becomes ``z / s`` and w becomes ``s / (s + 1 - w)``. Finally
    the node is accepted with probability w. Node 0 is always accepted (Weng et al. 2025, algorithm 3).

    Args:
        uniforms: ``[B, N]`` in [0, 1), one per node.
        draft, target_probs: same as in `kept_in_turn`.
    """
    tree, batch = draft.static_tree, len(draft.tokens)
    end, behind, done = jnp.zeros(batch, jnp.int32), jnp.zeros_like(target_probs[:, 0]), jnp.zeros(batch, bool)

    def visit(node: int, weight: Array) -> None:
        nonlocal end, behind, done
        remaining = residual(target_probs[:, node], jnp.zeros_like(behind))
        for child in tree.children[node][tree.children[node] > 0]:
            token, probs = draft.tokens[:, child - 1], draft.probs[:, child - 1]
            p, q = weight * at_tokens(remaining, token), at_tokens(probs, token)
            visit(int(child), jnp.where(q > 0, jnp.where(p >= q, 1, p / jnp.where(q > 0, q, 1)), 0))
            mass = weight[:, None] * remaining
            left = jnp.where(probs > 0, jnp.maximum(mass - probs, 0), mass).sum(-1)
            # If the target has no valid distribution, the text ends and the missing mass counts as remaining mass.
            left = jnp.where(mass.sum(-1) > 0, left, weight)
            remaining = residual(mass, probs)
            weight = jnp.where(weight >= 1, 1, left / (left + 1 - weight))
        kept = ~done & (uniforms[:, node - 1] < weight if node else True)
        end, behind, done = jnp.where(kept, node, end), jnp.where(kept[:, None], remaining, behind), done | kept

    visit(0, jnp.ones(batch, target_probs.dtype))
    return end, behind
