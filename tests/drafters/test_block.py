"""Block drafters: they compute what PyTorch does, after any number of rounds, in chains and trees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert.heads.block.config import MarkovConfig
from jspec.core.tree import Level, Tree
from jspec.drafters import BlockDrafter
from jspec.drafters.base import Context, TargetView
from jspec.drafters.signals import PromptSignals
from support import blocks, heads, toys
from support.head_rounds import rounds

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 3)
V, E = TARGET.config.vocab_size, TARGET.config.hidden_size
MARKOV = {kind: {"markov": MarkovConfig(kind, 5), "drafts_from_first": True} for kind in ("vanilla", "gated", "rnn")}
KINDS = {
    "dflash": {},
    "jetspec": {"causal": True},
    "output of the last layer": {"features": (0, 3), "num_layers": 1},
    **MARKOV,
    "few tokens": MARKOV["gated"] | {"draft_vocab_size": 5, "own_head": True, "own_embedding": True},
}
TREES = {
    "chain": (lambda one: one, 4, "rejection"),
    "varying": (lambda one: one, jspec.WhileConfident(4, 0.5), "block"),
    "tree": (lambda one: jspec.TreeDrafter(one, Tree.branching((2, 1, 2))), 4, "traversal"),
    "search": (lambda one: jspec.DynamicTreeDrafter(one, 6, 3, 2), 4, "coupled"),
}


FEW = {"max_new_tokens": 4}


def features_of(block, tokens):
    """Return the target's hidden states at ``tokens[B, S]`` that `block` reads."""
    batch, size = tokens.shape
    zeros = jnp.zeros(batch, jnp.int32)
    return TARGET.forward_with_features(tokens, TARGET.new_cache(batch, size), zeros, block.config.features)[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_logits_match_torch(report, kind, qk_norm):
    """A teacher-forced chain after sequences of different lengths, one of them a single token."""
    torch = pytest.importorskip("torch")
    from support import block_torch

    target = toys.tiny_llama(0, 3, qk_norm=qk_norm) if qk_norm else TARGET
    block = blocks.block(target, **KINDS[kind])
    drafter, k = BlockDrafter(block), block.config.num_draft_tokens
    rng = np.random.default_rng(0)
    lengths, tokens = np.array([7, 1, 4]), rng.integers(V, size=(3, 8))
    forced = rng.integers(V, size=(3, k))
    zeros = jnp.zeros(3, jnp.int32)
    read = target.forward_with_features(jnp.asarray(tokens), target.new_cache(3, 8), zeros, block.config.features)
    features = read[1]
    state = drafter.init(jnp.asarray(tokens), 12, PromptSignals(features, jnp.asarray(lengths), target))
    context = Context(
        jnp.asarray(tokens), jnp.asarray(lengths), zeros, None, None, TargetView(target, target.new_cache(3, 1), 1), V
    )
    found, carry = drafter.begin(state, context, Tree.chain(k))
    found = [found]
    for depth in range(1, k):
        following, carry = drafter.extend(carry, jnp.asarray(forced[:, depth - 1 : depth]), Level(depth), context)
        found.append(following[:, 0])
    worst = 0.0
    for row, length in enumerate(lengths):
        read = torch.tensor(np.array(features[row, : length - 1]))
        expected = block_torch.logits(block, target, read, [tokens[row, length - 1], *forced[row, :-1]]).numpy()
        ours = np.stack([one[row] for one in found])
        if block.config.draft_vocab_size:
            assert np.isneginf(ours[:, 5:]).all()
        worst = max(worst, np.abs(ours[:, : expected.shape[1]] - expected).max())
    report(max_error=worst)
    assert worst < 1e-4


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("dflash", "varying"),
        ("rnn", "chain"),
        ("few tokens", "tree"),
        ("jetspec", "search"),
        *(pytest.param(kind, tree, marks=pytest.mark.slow) for kind in KINDS for tree in TREES),
    ],
)
def test_cache_matches_target_states_of_text(prompts, kind, tree):
    """This holds with rejected draft tokens, row ends and limits, and from one-token prompts on."""
    wrap, length, rule = TREES[tree]
    block = blocks.block(TARGET, **KINDS[kind])
    batch = prompts([5, 1, 3, 9], vocab_size=V)

    @jax.jit
    def read_whole(tokens):
        size = tokens.shape[1]
        return block.read(features_of(block, tokens), block.new_cache(4, size), jnp.zeros(4, jnp.int32), TARGET)

    accepted, before = 0, None
    for state in rounds(TARGET, wrap(BlockDrafter(block)), batch, length, rule, [20, 7, 20, 1]):
        inner = state.drafter if tree in ("chain", "varying") else state.drafter[0]
        whole, found, lengths, done = jax.device_get((read_whole(state.tokens), inner, state.lengths, state.done))
        for row in np.flatnonzero(~done):
            assert found.lengths[row] == lengths[row]
            for ours, expected in zip(found.cache.values, whole.values, strict=True):
                end = lengths[row] - 1
                np.testing.assert_allclose(ours[row, :, :end], expected[row, :, :end], atol=2e-5)
            for ours, expected in zip(found.cache.keys, whole.keys, strict=True):
                np.testing.assert_allclose(ours[row, ..., :end], expected[row, ..., :end], atol=2e-5)
        accepted += 0 if before is None else int(np.maximum(lengths - before - 1, 0).sum())
        before = lengths
    assert accepted


@pytest.mark.parametrize(
    "kind", ["chain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("varying", "tree", "search"))]
)
def test_exact_block_is_always_accepted(kind):
    """A token's distribution depends on the token before it, which the Markov head must receive."""
    table = np.random.default_rng(2).normal(size=(V, V)) * 2
    target = heads.markov_llama(table)
    block = blocks.block(
        target, num_layers=1, own_head=True, **MARKOV["vanilla"] | {"markov": MarkovConfig("vanilla", V)}
    )
    block.lm_head.weight.set_value(jnp.zeros((E, V)))
    block.markov_head.markov_w1.weight.set_value(jnp.eye(V))
    block.markov_head.markov_w2.weight.set_value(jnp.asarray(table, jnp.float32))
    check = functools.partial(heads.check_always_right, target, temperature=0.8)
    if kind == "tree":
        check(jspec.TreeDrafter(BlockDrafter(block), Tree.branching((2, 1, 2))), num_draft_tokens=None)
    elif kind == "search":  # verified with the target's noise, with which it is also drawn
        check(jspec.DynamicTreeDrafter(BlockDrafter(block), 9, 3, 2), num_draft_tokens=None, accept="coupled")
    else:
        check(BlockDrafter(block), num_draft_tokens=jspec.WhileConfident(3, 0.0) if kind == "varying" else 3)


def test_more_tokens_than_a_block_drafts_are_refused(prompts):
    for drafter, most in ((blocks.drafter(TARGET), 5), (blocks.drafter(TARGET, drafts_from_first=True), 6)):
        assert drafter.max_chain_length == most
        with pytest.raises(ValueError, match=f"at most {most}"):
            jspec.speculative_generate(TARGET, drafter, *prompts([4], vocab_size=V), num_draft_tokens=7, **FEW)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [({"hidden_size": 32}, "hidden size is 16"), ({"vocab_size": 10}, "vocab"), ({"num_layers": 2}, "from 0 to 2")],
)
def test_drafter_for_another_target_is_refused(prompts, sizes, found):
    drafter = blocks.drafter(TARGET, features=(1, 3))
    layers = sizes.pop("num_layers", 3)
    with pytest.raises(ValueError, match=found):
        jspec.speculative_generate(toys.tiny_llama(0, layers, **sizes), drafter, *prompts([4], vocab_size=V), **FEW)


def test_wrong_block_is_refused(prompts):
    with pytest.raises(TypeError, match="pass a jspec"):
        jspec.speculative_generate(TARGET, BlockDrafter(TARGET), *prompts([4], vocab_size=V), **FEW)
