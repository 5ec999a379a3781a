"""Trees: their shape, a pass over a tree against plain passes over its paths, and caches after a path is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.core.tree import Branches, Tree
from jspec.models.kv_cache import keep, prefill
from support import toys

TREES = {
    "chain": Tree.chain(3),
    "two children": Tree.branching((2,)),
    "3-2-1": Tree.branching((3, 2, 1)),
    "depth first": Tree((0, 1, 1, 0, 4, 5, 4)),
    "lopsided": Tree((0, 0, 2, 2, 2, 3)),
}
MODELS = {"llama": {}, "qwen": {"qkv_bias": True, "qk_norm": True}}


@st.composite
def trees(draw, most=9):
    """Draw a tree of up to `most` draft tokens."""
    return Tree(tuple(draw(st.integers(0, node)) for node in range(draw(st.integers(1, most)))))


def test_chain_and_branching_constructors():
    assert Tree.chain(4).parents == (0, 1, 2, 3)
    assert Tree.chain(0).parents == () and Tree.chain(0).max_children == 0 and Tree.chain(0).max_depth == 0
    tree = Tree.branching((3, 2, 1))
    assert (tree.size, tree.max_depth, tree.max_children) == (15, 3, 3)
    assert tree.parents == (0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9)
    assert tree.children[:3].tolist() == [[1, 2, 3], [4, 5, 0], [6, 7, 0]]
    assert Tree.branching((1, 1)) == Tree.chain(2) and Tree.chain(2).is_chain and not tree.is_chain


@given(trees())
@settings(max_examples=100, deadline=None)
def test_depths_ancestors_and_children_match_parent_walk(tree):
    for node in range(tree.size + 1):
        path, at = [node], node
        while at:
            at = tree.parents[at - 1]
            path.append(at)
        assert tree.offsets[node] == len(path) - 1
        assert set(np.flatnonzero(tree.ancestors[node])) == set(path)
        children = [child for child in range(1, tree.size + 1) if tree.parents[child - 1] == node]
        assert tree.children[node][tree.children[node] > 0].tolist() == children
    ordered = tree.by_depth()
    assert np.all(np.diff(ordered.offsets) >= 0) and ordered.by_depth() == ordered
    assert sorted(_paths(ordered)) == sorted(_paths(tree))


def _paths(tree):
    """Return each node's sibling ranks from the root down; they identify a tree under any numbering."""
    paths = {0: ()}
    for node in range(tree.size + 1):
        for rank, child in enumerate(tree.children[node][tree.children[node] > 0]):
            paths[int(child)] = (*paths[node], rank)
    return paths.values()


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((1, 0), "The parent of node 1 must be one of the nodes before it, 0 to 0"),
        ((0, 2), "The parent of node 2 must be one of the nodes before it, 0 to 1"),
        ((0, -1), r"0 is the last committed token\); got -1"),
        ((0, 1.0), "must be an int; got 1.0"),
        ((0, True), "must be an int; got True"),
        (3, "parents must be a sequence of ints; got 3"),
    ],
)
def test_invalid_tree_is_rejected(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


def test_level_without_children_is_rejected():
    with pytest.raises(ValueError, match="Every number of children must be an int of at least 1; got 0"):
        Tree.branching((2, 0))


def _read(model, rng, tree, slots=24):
    """Prefill a ragged batch; return its cache, prompts, their lengths, and the draft tokens ``int32[B, N + 1]``."""
    lengths = np.array([5, 2, 4])
    prompts = rng.integers(8, size=(3, 5))
    cache = prefill(model, jnp.asarray(prompts), slots)
    nodes = np.concatenate([prompts[np.arange(3), lengths - 1][:, None], rng.integers(8, size=(3, tree.size))], axis=1)
    return cache, prompts, lengths, nodes


def _path(tree, node):
    """Return the nodes from node 0 down to `node`."""
    return np.flatnonzero(tree.ancestors[node])


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", TREES)
def test_every_node_attends_only_to_its_path(name, family):
    tree, model = TREES[name], toys.tiny_llama(0, **MODELS[family])
    cache, prompts, lengths, nodes = _read(model, np.random.default_rng(1), tree)
    hidden, _ = model.forward(
        jnp.asarray(nodes), cache, jnp.asarray(lengths - 1), branches=Branches(tree.offsets, tree.ancestors)
    )
    logits = model.logits(hidden)
    for b, node in np.ndindex(3, tree.size + 1):
        text = np.concatenate([prompts[b, : lengths[b] - 1], nodes[b, _path(tree, node)]])
        np.testing.assert_allclose(logits[b, node], model(text[None])[0, -1], atol=1e-5)


def test_reading_tree_by_level_equals_reading_at_once():
    tree, model = TREES["3-2-1"], toys.tiny_llama(0)
    cache, _, lengths, nodes = _read(model, np.random.default_rng(2), tree)
    start = jnp.asarray(lengths - 1)
    levels = [np.flatnonzero(tree.offsets == depth) for depth in range(tree.max_depth + 1)]

    @jax.jit
    def read(cache):
        at_once, _ = model.forward(jnp.asarray(nodes), cache, start, branches=tree.branches)
        found = []
        for depth, level in enumerate(levels):
            branches = tree.level(depth).branches if depth else Branches(tree.offsets[:1], tree.ancestors[:1, :1])
            hidden, cache = model.forward(jnp.asarray(nodes[:, level]), cache, start, branches=branches)
            found.append(hidden)
        return at_once, found

    at_once, found = jax.device_get(read(cache))
    for hidden, level in zip(found, levels, strict=True):
        np.testing.assert_allclose(hidden, at_once[:, level], atol=1e-5)


def test_tree_with_separate_past_cache_gives_same_states():
    tree, model = TREES["lopsided"], toys.tiny_llama(0)
    cache, _, lengths, nodes = _read(model, np.random.default_rng(3), tree)
    start = jnp.asarray(lengths - 1)
    expected, _ = model.forward(jnp.asarray(nodes), cache, start, branches=tree.branches)
    own = model.new_cache(3, tree.size + 1)
    hidden, _ = model.forward(jnp.asarray(nodes), own, start, past=(cache, start), branches=tree.branches)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)


@pytest.mark.parametrize("name", TREES)
def test_kept_path_equals_fresh_prefill(name):
    tree, model, rng = TREES[name], toys.tiny_llama(0), np.random.default_rng(4)
    cache, prompts, lengths, nodes = _read(model, rng, tree)
    start = jnp.asarray(lengths - 1)
    _, cache = model.forward(jnp.asarray(nodes), cache, start, branches=tree.branches)
    ends = rng.integers(tree.size + 1, size=3)
    path = np.zeros((3, tree.max_depth), int)
    for b, end in enumerate(ends):
        path[b, : tree.offsets[end]] = _path(tree, end)[1:]
    kept = jax.jit(keep)(cache, start, jnp.asarray(path))
    for b, end in enumerate(ends):
        text = np.concatenate([prompts[b, : lengths[b] - 1], nodes[b, _path(tree, end)]])
        fresh = prefill(model, jnp.asarray(text[None]), 24)
        for ours, theirs in zip(jax.tree.leaves(kept.keys), jax.tree.leaves(fresh.keys), strict=True):
            np.testing.assert_allclose(ours[b, :, :, : text.size], theirs[0, :, :, : text.size], atol=1e-5)
        for ours, theirs in zip(jax.tree.leaves(kept.values), jax.tree.leaves(fresh.values), strict=True):
            np.testing.assert_allclose(ours[b, :, : text.size], theirs[0, :, : text.size], atol=1e-5)
