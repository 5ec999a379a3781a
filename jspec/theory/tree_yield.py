# pyright: reportUnnecessaryIsInstance=false
"""The expected number of tokens from a draft tree, and the best tree of a given size, given acceptance rates by rank.

If its parent is accepted, a child of rank r is accepted with probability ``acceptance_by_rank[r]``, at any depth. This
is the positional acceptance assumption of Chen et al. 2024, "Sequoia", section 3.1. A node's value is therefore the
product of the probabilities along its branch. A round yields one token plus the sum of all node values.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.core.tree import Tree

_ROUNDING = 1e-9


def tree_yield(tree: Tree, acceptance_by_rank: ArrayLike) -> float:
    """Return the expected number of tokens per round with `tree`, including the token after the accepted path.

    Args:
        tree: a tree whose nodes have at most R children.
        acceptance_by_rank: `[R]`, for each rank, the probability that the child of that rank is the accepted one.

    Raises:
        ValueError: `tree` is not a `Tree`, or the rates are invalid or too few.
    """
    if not isinstance(tree, Tree):
        raise ValueError(f"tree is of type {type(tree).__name__}; pass a jspec.Tree.")
    rates = _rates(acceptance_by_rank)
    if tree.max_children > rates.size:
        raise ValueError(
            f"A node of the tree has {tree.max_children} children, but acceptance_by_rank has only {rates.size} "
            "rates; pass one rate for each child."
        )
    worth = np.ones(tree.size + 1)
    for node, parent in enumerate(tree.parents, 1):
        worth[node] = worth[parent] * rates[np.flatnonzero(tree.children[parent] == node)[0]]
    return float(worth.sum())


def best_tree(acceptance_by_rank: ArrayLike, num_nodes: int, max_depth: int) -> Tree:
    """Return the tree with the largest `tree_yield` among those with `num_nodes` nodes and at most `max_depth` levels.

    This uses the dynamic program of Chen et al. 2024, "Sequoia", section 3.1, in time O(R n^2 max_depth) for R ranks.

    Args:
        acceptance_by_rank: `[R]`, same as in `tree_yield`. No node gets more than R children.
        num_nodes: n, at least 1.
        max_depth: at least 1.

    Returns:
        A tree that is numbered by depth. The tree has fewer nodes if no more fit, or if more would not raise the yield.

    Raises:
        ValueError: `num_nodes` or `max_depth` is not an int of at least 1, or the rates are invalid.
    """
    rates = _rates(acceptance_by_rank)
    for name, value in (("num_nodes", num_nodes), ("max_depth", max_depth)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be an int of at least 1; got {value!r}.")
    sizes = _best_sizes(rates, int(num_nodes), min(int(max_depth), int(num_nodes)))
    parents: list[int] = []
    # Each entry holds a node, the number of nodes below it, and the levels left for them. Nodes are appended by depth.
    level = [(0, int(num_nodes), len(sizes) - 1)]
    while level:
        below: list[tuple[int, int, int]] = []
        for node, budget, depth in level:
            for rank in range(rates.size):
                size = sizes[depth][rank][budget] if depth else 0
                if not size:
                    break
                parents.append(node)
                below.append((len(parents), size - 1, depth - 1))
                budget -= size
        level = below
    return Tree(tuple(parents))


def _best_sizes(rates: NDArray[np.float64], num_nodes: int, max_depth: int) -> list[list[list[int]]]:
    """Return ``[depth][rank][n]``, the best size of a rank's subtree if n nodes remain for this and later ranks."""
    ranks = rates.size
    worth = np.zeros((ranks + 1, num_nodes + 1))  # the yield of this and later ranks with n nodes; 0 at depth 0
    sizes: list[list[list[int]]] = [[[0] * (num_nodes + 1)] * ranks]
    for _ in range(max_depth):
        below, worth = worth[0], np.zeros((ranks + 1, num_nodes + 1))
        chosen: list[list[int]] = []
        for rank in reversed(range(ranks)):
            best = [0]
            for n in range(1, num_nodes + 1):
                # The subtree has 1 to n nodes, including its root. The other nodes go to the later siblings.
                values = rates[rank] * (1 + below[:n]) + worth[rank + 1][n - 1 :: -1]
                size = int(np.argmax(values)) + 1
                worth[rank][n] = values[size - 1]
                best.append(size)
            chosen.append(best)
        sizes.append(chosen[::-1])
    return sizes


def _rates(acceptance_by_rank: ArrayLike) -> NDArray[np.float64]:
    try:
        rates = np.asarray(acceptance_by_rank, np.float64)
    except (TypeError, ValueError):
        rates = np.empty(())
    if rates.ndim != 1 or not rates.size or not np.all((rates >= 0) & (rates <= 1)) or rates.sum() > 1 + _ROUNDING:
        raise ValueError(
            "acceptance_by_rank must be a list of probabilities, one per rank, that sum to at most 1, because at "
            f"most one child is accepted; got {acceptance_by_rank!r}."
        )
    return rates
