"""Prompts, drafters and comparisons for tests of `jspec.Rollout`."""

import jax
import numpy as np

import jspec
from jspec.models.kv_cache import KVCache
from support import drafters
from support.law import VOCAB
from support.matrix import PROMPTS, pair

BATCH, NEW, LENGTH, K = 5, 12, 64, 3
OWN_TREES = {
    "tree": lambda target, draft: jspec.TreeDrafter(draft, jspec.Tree.branching((2, 2, 1))),
    "eagle tree": lambda target, draft: jspec.TreeDrafter(drafters.make("eagle", target, draft), jspec.Tree.chain(3)),
    "dynamic": lambda target, draft: jspec.DynamicTreeDrafter(draft, 6, 3, 2),
    "dynamic eagle": lambda target, draft: jspec.DynamicTreeDrafter(drafters.make("eagle 3", target, draft), 6, 3, 2),
}


def prompts():
    tokens = np.zeros((BATCH, 6), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(p) for p in PROMPTS]), jax.random.split(jax.random.key(1), BATCH)


def make(name):
    target, draft = pair()
    drafter = OWN_TREES[name](target, draft) if name in OWN_TREES else drafters.make(name, target, draft)
    is_tree = name in OWN_TREES or name in drafters.TREE_NAMES
    return target, drafter, {} if is_tree else {"num_draft_tokens": K}


def reply(seed, width=4):
    """Return an environment's tokens, with 0 to `width` tokens per row."""
    rng = np.random.default_rng(seed)
    return rng.integers(VOCAB, size=(BATCH, width)), rng.permutation(BATCH) % (width + 1)


def same(one, other, atol=1e-4):
    for leaf, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=atol)


def whole_text(rollout):
    return np.asarray(rollout.tokens), np.asarray(rollout.lengths)


def caches(rollout):
    """Return the entries of all KV caches of a roll-out, with zeros in the slots from the last token on."""
    unused = np.arange(rollout.state.cache.keys[0].shape[3])[None] >= np.asarray(rollout.lengths)[:, None] - 1
    parts = jax.tree.leaves(
        (rollout.state.cache, rollout.state.drafter), is_leaf=lambda node: isinstance(node, KVCache)
    )
    found = [part for part in parts if isinstance(part, KVCache)]
    keys = [np.where(unused[:, None, None], 0, keys) for cache in found for keys in cache.keys]
    return keys + [np.where(unused[:, None, :, None], 0, values) for cache in found for values in cache.values]
