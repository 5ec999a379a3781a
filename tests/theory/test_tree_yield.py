"""Tree yields match values by hand and by simulation, and no tree beats the best tree."""

import itertools

import numpy as np
import pytest

from jspec import Tree, theory

SEQUOIA = (0.634, 0.108, 0.057, 0.022)


def all_trees(num_nodes, max_depth, max_children):
    """Yield every tree at least once, built from its parents, with siblings in some order."""
    for parents in itertools.product(*(range(node) for node in range(1, num_nodes + 1))):
        tree = Tree(parents)
        if tree.max_depth <= max_depth and tree.max_children <= max_children:
            yield tree


def test_chain_yield_matches_theorem():
    assert theory.tree_yield(Tree.chain(4), [0.7]) == pytest.approx(theory.expected_tokens(0.7, 4))
    assert theory.tree_yield(Tree.branching((2, 1)), [0.5, 0.3]) == pytest.approx(1 + 0.8 + 0.5 * 0.5 + 0.3 * 0.5)


def test_tree_yield_matches_simulated_walk(report):
    tree, rates, rng = Tree((0, 0, 1, 1, 2, 4)), np.array([0.6, 0.3]), np.random.default_rng(0)
    tokens, rounds = 0, 20_000
    for _ in range(rounds):
        node = 0
        while True:
            tokens += 1
            children = tree.children[node][tree.children[node] > 0]
            rank = np.searchsorted(np.cumsum(rates), rng.random())
            if rank >= len(children):
                break
            node = children[rank]
    expected = theory.tree_yield(tree, rates)
    report(simulated=f"{tokens / rounds:.3f}", expected=f"{expected:.3f}")
    assert tokens / rounds == pytest.approx(expected, abs=4 * 1.2 / rounds**0.5)


@pytest.mark.parametrize("rates", [SEQUOIA[:3], (0.3, 0.5, 0.1), (0.9, 0.0), (0.4,), (0.0, 0.6)])
@pytest.mark.parametrize("max_depth", [1, 2, 6])
def test_best_tree_is_optimal_by_enumeration(rates, max_depth):
    for num_nodes in range(1, 7):
        best = theory.best_tree(rates, num_nodes, max_depth)
        assert best.max_depth <= max_depth and best.max_children <= len(rates) and best == best.by_depth()
        known = [theory.tree_yield(tree, rates) for tree in all_trees(num_nodes, max_depth, len(rates))]
        assert theory.tree_yield(best, rates) >= max(known, default=0) - 1e-12
        assert best.size == num_nodes or not known or 0 in rates, "as many nodes as fit and bring something"


def test_published_acceptance_gives_known_shapes():
    """The best tree is a chain if only first children are accepted, and a root with leaves if the depth is 1."""
    assert theory.best_tree((0.9, 0.001), 5, 5).is_chain
    assert theory.best_tree(SEQUOIA, 4, 1) == Tree.branching((4,))
    large = theory.best_tree(SEQUOIA, 64, 8)
    assert large.size == 64 and theory.tree_yield(large, SEQUOIA) > theory.tree_yield(Tree.chain(8), SEQUOIA[:1]) + 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0.5, 0.6), 3, 2), "sum to at most 1"),
        (((), 3, 2), "must be a list of probabilities"),
        (((-0.1,), 3, 2), "must be a list of probabilities"),
        ((0.5, 3, 2), "must be a list of probabilities"),
        (((np.nan,), 3, 2), "must be a list of probabilities"),
        (((0.5,), 0, 2), "num_nodes must be an int of at least 1; got 0"),
        (((0.5,), 3, 1.5), "max_depth must be an int of at least 1; got 1.5"),
    ],
)
def test_invalid_numbers_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        theory.best_tree(*arguments)


def test_tree_with_more_children_than_rates_is_rejected():
    with pytest.raises(ValueError, match="has 3 children, but acceptance_by_rank has only 2 rates"):
        theory.tree_yield(Tree.branching((3,)), (0.5, 0.2))
