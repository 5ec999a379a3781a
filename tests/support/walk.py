"""Helpers for the tree-walk tests and others."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.acceptance.k_seq import residual_at, verify_siblings
from jspec.acceptance.traversal import traverse
from jspec.acceptance.walk import whole
from jspec.core.tree import Tree
from jspec.core.types import Draft
from jspec.rules import kept_in_turn, next_probs_at
from support import oracle
from support.accept import random_laws

CASES = {
    "chain": (Tree.chain(3), 3),
    "two children": (Tree.branching((2,)), 4),
    "three children": (Tree.branching((3,)), 4),
    "as many as tokens": (Tree.branching((3,)), 3),
    "2-2": (Tree.branching((2, 2)), 3),
    "3-1": (Tree.branching((3, 1)), 4),
    "1-2-1": (Tree.branching((1, 2, 1)), 3),
    "lopsided": (Tree((0, 0, 2, 2, 0)), 3),
    "depth first": (Tree((0, 1, 1, 0, 4)), 3),
}


TOLERANCE = 1e-12


def tables(rng, vocab_size, depth):
    """Return distributions p and q after every text of up to `depth` tokens: ``text -> float64[V]``."""
    texts = [text for n in range(depth + 1) for text in itertools.product(range(vocab_size), repeat=n)]
    return tuple(dict(zip(texts, random_laws(rng, (len(texts), vocab_size)), strict=True)) for _ in range(2))


def drafts(tree, q, replacement):
    """Return every possible draft: ``(weight, tokens [N], distributions [N, V])``."""
    found = [(1.0, (), ())]
    for node in range(1, tree.size + 1):
        grown = []
        for weight, tokens, laws in found:
            law = law_of(tree, q, node, tokens, replacement)
            grown += [(weight * law[x], (*tokens, x), (*laws, law)) for x in np.flatnonzero(law)]
        found = grown
    return found


def law_of(tree, q, node, tokens, replacement):
    """Return the distribution that a node is drawn from: what earlier siblings have left of q after its parent."""
    parent = tree.parents[node - 1]
    law = q[text_of(tree, parent, tokens)].copy()
    if not replacement:
        law[[tokens[n - 1] for n in range(1, node) if tree.parents[n - 1] == parent]] = 0
    return law / law.sum()


def text_of(tree, node, tokens):
    """Return the tokens on the path to a node."""
    return tuple(tokens[n - 1] for n in np.flatnonzero(tree.ancestors[node])[1:])


def joint_law(tree, p, found, ends):
    """Return the joint distribution ``[V^(depth + 1)]`` of texts that start with a round over the drafts in `found`."""
    weights, tokens, laws = (np.array(part) for part in zip(*found, strict=True))
    behind = [[p[text_of(tree, node, row)] for node in range(tree.size + 1)] for row in tokens]
    draft, target_probs = Draft(jnp.asarray(tokens), jnp.asarray(laws), tree), jnp.asarray(behind)
    vocab_size, depth = laws.shape[-1], tree.max_depth
    joint = np.zeros((vocab_size,) * (depth + 1))
    for node, (mass, after) in enumerate(ends(draft, target_probs)):
        for row, law in zip(tokens, (weights * mass)[:, None] * after, strict=True):
            joint += texts_behind(p, text_of(tree, node, row), law, depth + 1)
    return joint


def ends_of_walk(draft, target_probs, bound=whole):
    """Return for each node the probability ``[R]`` that `Rejection` ends there, and the distribution after it."""
    nodes = range(1, draft.topology.size + 1)
    thresholds = np.stack([threshold(draft, target_probs, node, bound) for node in nodes], axis=1)
    next_probs = jax.jit(functools.partial(next_probs_at, bound=bound))
    return walked(draft, thresholds, lambda end: next_probs(end, draft, target_probs))


def ends_of_k_seq(draft, target_probs):
    """Return the same as `ends_of_walk`, for `KSeq`."""
    judge = jax.jit(lambda u: verify_siblings(u, draft, target_probs))
    thresholds = oracle.acceptance_thresholds(lambda u: np.asarray(judge(u)[0]), draft.tokens.shape)
    taken_of = judge(np.zeros(draft.tokens.shape))[1]
    return walked(draft, thresholds, lambda end: residual_at(end, taken_of, target_probs))


def walked(draft, thresholds, law):
    """Yield the ends of a walk to the first accepted child, each accepted by its own threshold ``[R, N]``."""
    tree, rows = draft.topology, len(draft.tokens)
    for node in range(tree.size + 1):
        mass = np.prod([np.ones(rows), *(taken(tree, thresholds, n) for n in tree.paths[node] if n)], axis=0)
        mass = mass * np.prod(1 - thresholds[:, children(tree, node) - 1], axis=1)
        yield mass, np.asarray(law(jnp.full(rows, node, jnp.int32)))


def ends_of_traversal(draft, target_probs):
    """Return the same for `Traversal`, which verifies nodes after all their descendants, and earlier branches first."""
    tree, rows = draft.topology, len(draft.tokens)
    run = jax.jit(lambda uniforms: traverse(uniforms, draft, target_probs))

    def alone(node, u):
        """Run with every other node rejected."""
        return run(jnp.ones((rows, tree.size)).at[:, node - 1].set(jnp.asarray(u)))

    def weight(node):
        return oracle.acceptance_thresholds(lambda u: np.asarray(alone(node, u)[0] == node), rows)

    def judged_before(node):
        return [n for child in children(tree, node) for n in (*judged_before(child), child)]

    order, left = [*judged_before(0), 0], np.ones(rows)
    found = {}
    for node in order:
        chance = weight(node) if node else np.ones(rows)
        law = alone(node, np.zeros(rows))[1] if node else run(jnp.ones((rows, tree.size)))[1]
        found[node] = left * chance, np.where(chance[:, None] > 0, law, 0)
        left = left * (1 - chance)
    return [found[node] for node in range(tree.size + 1)]


def texts_behind(p, text, law, length):
    """Return the joint distribution of texts that begin with `text` and a token of `law`, then follow the target."""
    vocab_size = law.size
    joint = np.zeros((vocab_size,) * length)
    for rest in itertools.product(range(vocab_size), repeat=length - len(text)):
        weight, so_far = law[rest[0]], (*text, rest[0])
        for token in rest[1:]:
            weight *= p[so_far][token]
            so_far = (*so_far, token)
        joint[so_far] += weight
    return joint


def children(tree, node):
    return tree.children[node][tree.children[node] > 0]


def taken(tree, thresholds, node):
    """Return the probability that the walk goes on from a node's parent to the node."""
    elder = [n for n in children(tree, tree.parents[node - 1]) if n < node]
    return thresholds[:, node - 1] * np.prod(1 - thresholds[:, np.array(elder, int) - 1], axis=1)


def threshold(draft, target_probs, node, bound=whole):
    """Measure the uniform below which a node is accepted, in every row."""
    tree = draft.topology
    shape = len(draft.tokens), tree.max_depth

    @jax.jit
    def accepts(u):
        uniforms = [jnp.broadcast_to(u[:, None], shape)] * tree.max_children
        return kept_in_turn(uniforms, draft, target_probs, bound)[0][:, node - 1]

    return oracle.acceptance_thresholds(lambda u: np.asarray(accepts(u)), len(draft.tokens))


ENDS = {"rejection": ends_of_walk, "traversal": ends_of_traversal, "k-seq": ends_of_k_seq}


def error(tree, vocab_size, replacement, rule="rejection", change=lambda found: found):
    p, q = tables(np.random.default_rng(0), vocab_size, tree.max_depth)
    with jax.enable_x64(True):
        joint = joint_law(tree, p, change(drafts(tree, q, replacement)), ENDS[rule])
    expected = texts_behind(p, (), p[()], tree.max_depth + 1)
    return np.abs(joint - expected).max()
