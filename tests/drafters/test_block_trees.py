"""Trees from a single block: the best-first tree is the exact one, and the layers run once per tree."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert.heads.block.config import MarkovConfig
from jspec.core.keys import draft_noise
from jspec.core.probs import foreseen
from jspec.core.sampling import token_probs
from jspec.core.tree import Level, Tree
from jspec.drafters.base import Context, TargetView
from jspec.drafters.draft_length import DEFAULT
from jspec.drafters.heads.block_module import Block
from jspec.drafters.signals import PromptSignals
from jspec.drafters.trees.dynamic import _SHARPNESS
from support import blocks, drafters, toys
from support.block_checks import features_of
from support.matrix import check_texts, pair, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET, V, DEPTH, NODES = toys.tiny_llama(0, 3), 8, 3, 7
KINDS = {
    "without a Markov head": {},
    "vanilla": {"markov": MarkovConfig("vanilla", 4), "drafts_from_first": True},
    "rnn": {"markov": MarkovConfig("rnn", 4), "causal": True},
}


def start(drafter, temperature):
    """Return the drafter's signals and a context, for sequences of different lengths."""
    tokens, lengths = np.random.default_rng(0).integers(V, size=(3, 6)), np.array([6, 1, 4])
    signals = PromptSignals(features_of(TARGET, drafter.block, jnp.asarray(tokens)), jnp.asarray(lengths), TARGET)
    keys = jax.random.split(jax.random.key(2), 3)
    noise = draft_noise(keys, lengths[:, None] + np.arange(DEPTH), V)
    transforms = toys.both_transforms(jspec.SamplingParams(temperature=temperature), 3)[1]
    view, text = TargetView(TARGET, TARGET.new_cache(3, 1), 1), jnp.pad(jnp.asarray(tokens), ((0, 0), (0, DEPTH)))
    return text, signals, Context(text, jnp.asarray(lengths), noise, transforms, None, view, V)


def scores_of_all_paths(drafter, state, context, temperature):
    """Return a dict that maps each path of at most `DEPTH` tokens to its scores ``[B]``.

    Each token adds a log-probability. Under greedy decoding, it is the draft's. Otherwise, it is that of drawing the
    token with the target's noise, as `foreseen` estimates it.
    """

    def log_probs(logits, depth):
        probs = token_probs(logits[:, None], context.transforms, None)
        if not temperature:
            return np.asarray(jax.nn.log_softmax(logits))
        return np.asarray(foreseen(context.noise[:, None, depth, 0], probs, _SHARPNESS))[:, 0]

    logits, carry = drafter.begin(state, context, Tree.chain(DEPTH))
    extend = [jax.jit(lambda carry, token, d=d: drafter.extend(carry, token, Level(d), context)) for d in range(DEPTH)]
    nodes, found = {(): (logits, carry, 0.0)}, {}
    for depth in range(DEPTH):
        following = {}
        for (path, (logits, carry, score)), token in itertools.product(nodes.items(), range(V)):
            found[(*path, token)] = score + log_probs(logits, depth)[:, token]
            if depth + 1 < DEPTH:
                after, carried = extend[depth + 1](carry, jnp.full((3, 1), token))
                following[(*path, token)] = after[:, 0], carried, found[(*path, token)]
        nodes = following
    return found


def paths(tokens, parents):
    """Return the set of the paths from the root to each node of a tree."""
    found = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], int(token)))
    return set(found[1:])


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        ("vanilla", 0.0),
        *(
            pytest.param(kind, temperature, marks=pytest.mark.slow)
            for kind, temperature in itertools.product(KINDS, (0.0, 0.8))
        ),
    ],
)
def test_wide_search_finds_the_most_likely_nodes(kind, temperature):
    """A `width` that holds every level of the best tree suffices, and a width of `num_nodes` always does."""
    drafter = blocks.drafter(TARGET, **KINDS[kind])
    text, signals, context = start(drafter, temperature)
    search = jspec.DynamicTreeDrafter(drafter, num_nodes=NODES, max_depth=DEPTH, width=NODES)
    draft, _ = search.propose(search.init(text, text.shape[1] + NODES, signals), context, DEPTH)
    state = drafter.init(text, text.shape[1], signals)
    scores, deep = scores_of_all_paths(drafter, state, context, temperature), 0
    for row in range(3):
        best = sorted(scores, key=lambda path, row=row: -scores[path][row])[:NODES]
        assert paths(draft.tokens[row], draft.tree.parents[row]) == set(best)
        deep = max(deep, *map(len, best))
    assert deep > 1


@pytest.mark.parametrize("kind", KINDS)
def test_layers_run_once_per_tree(monkeypatch, kind):
    drafter, calls, forward = blocks.drafter(TARGET, **KINDS[kind]), [], Block.forward
    text, signals, context = start(drafter, 0.0)
    monkeypatch.setattr(Block, "forward", lambda *args: calls.append(1) or forward(*args))
    for tree in (
        jspec.DynamicTreeDrafter(drafter, num_nodes=NODES, max_depth=DEPTH, width=4),
        jspec.TreeDrafter(drafter, Tree((0, 1, 2))),
    ):
        calls.clear()
        state = jax.eval_shape(functools.partial(tree.init, num_slots=32, signals=signals), text)
        jax.eval_shape(lambda state, tree=tree: tree.propose(state, context, DEPTH), state)
        assert calls == [1]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_three_tokens_have_target_joint_distribution(report, rule):
    drafter = jspec.TreeDrafter(drafters.make("block with corrections", *pair()), Tree((0, 0, 1, 2)))
    check_texts(report, text_p_values(drafter, rule, 8_192, DEFAULT), 8_192, 2)
