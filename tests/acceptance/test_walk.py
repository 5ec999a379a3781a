"""The distribution of one round over a tree, enumerated in float64 through the shipped rules; and chains as trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.tree import Tree
from jspec.core.types import Draft
from jspec.rules import RULES, accept_nodes, accept_tokens, follow
from support.accept import random_laws
from support.few import by_default
from support.walk import CASES, TOLERANCE, error, tables


@pytest.mark.parametrize(
    ("rule", "replacement"),
    [("rejection", False), ("rejection", True), ("traversal", False), ("traversal", True), ("k-seq", True)],
)
@pytest.mark.parametrize("name", by_default(CASES, list(CASES)[::2]))
def test_every_sequence_of_a_round_has_target_probability(report, name, replacement, rule, quick_compile):
    worst = error(*CASES[name], replacement, rule)
    report(largest_error=f"{worst:.1e}", limit=TOLERANCE)
    assert worst < TOLERANCE


def test_stale_probs_of_siblings_without_replacement_are_caught(report, quick_compile):
    """Planted bug: the later sibling is verified with q as it was before the earlier sibling was drawn."""
    tree, vocab_size = CASES["two children"]
    q = tables(np.random.default_rng(0), vocab_size, tree.max_depth)[1]
    worst = error(tree, vocab_size, False, change=lambda found: [(w, x, (q[()], q[()])) for w, x, _ in found])
    report(largest_error=f"{worst:.1e}")
    assert worst > 1e-4


def test_soft_probs_for_deterministic_children_are_caught(report, quick_compile):
    """Planted bug: q's two most likely tokens are verified as if drawn from q; one-hot distributions are correct."""
    tree, vocab_size = CASES["two children"]
    q = tables(np.random.default_rng(0), vocab_size, tree.max_depth)[1][()]
    best = tuple(np.argsort(-q)[:2])
    worst = error(tree, vocab_size, False, change=lambda found: [(1.0, best, (q, q))])
    right = error(tree, vocab_size, False, change=lambda found: [(1.0, best, tuple(np.eye(vocab_size)[list(best)]))])
    report(soft=f"{worst:.1e}", certain=f"{right:.1e}")
    assert worst > 1e-3 and right < TOLERANCE


@pytest.mark.parametrize("rule", ["rejection", "coupled", "traversal"])
def test_chain_verified_as_tree_gives_same_verdict(rule, monkeypatch, quick_compile):
    rng, tree = np.random.default_rng(0), Tree.chain(4)
    p, q = random_laws(rng, (500, 5, 9)).astype(np.float32), random_laws(rng, (500, 4, 9)).astype(np.float32)
    q = (q + 2 * p[:, :4]) / 3
    tokens = np.array([[rng.choice(9, p=law / law.sum()) for law in row.astype(float)] for row in q])
    draft = Draft(jnp.asarray(tokens), jnp.asarray(q), tree)
    keys, start = jax.random.split(jax.random.key(0), 500), jnp.arange(500)
    expected = RULES[rule].accept(keys, start, draft, jnp.asarray(p))
    monkeypatch.setattr(Tree, "is_chain", False)
    found = jax.jit(RULES[rule].accept)(keys, start, draft, jnp.asarray(p))
    np.testing.assert_array_equal(found.num_accepted, expected.num_accepted)
    np.testing.assert_array_equal(found.next_token, expected.next_token)
    steps = np.arange(4)
    np.testing.assert_array_equal(found.path, np.where(steps < np.asarray(found.num_accepted)[:, None], steps + 1, 0))
    assert set(np.asarray(found.num_accepted).tolist()) >= {0, 1, 2, 3}


def test_first_of_equally_accepted_siblings_is_followed():
    tree = Tree((0, 0, 1, 2))
    num_accepted, path = follow(jnp.asarray([[True, True, False, True], [False, True, True, True]]), tree)
    np.testing.assert_array_equal(num_accepted, [1, 2])
    np.testing.assert_array_equal(path, [[1, 0], [2, 4]])


def test_node_without_probs_is_never_accepted():
    """A node whose distribution is all zeros is never kept, and its children do not count."""
    tree = Tree((0, 1))
    draft = Draft(jnp.zeros((1, 2), jnp.int32), jnp.asarray([[[0.0, 0.0], [1.0, 0.0]]]), tree)
    laws = jnp.full((1, 3, 2), 0.5)
    keys = jax.random.split(jax.random.key(0), 1)

    @jax.jit
    def verdicts(keys):
        root = jnp.zeros(1, int)
        return accept_nodes(keys, root, draft, laws), accept_tokens(keys, root, draft, laws, laws[:, :-1])

    for verdict in verdicts(keys):
        assert verdict.num_accepted[0] == 0
