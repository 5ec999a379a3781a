"""Kangaroo: its adapter matches PyTorch, and its cache matches the sequence, round by round."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.drafters.heads.kangaroo import Adapter
from support import heads, toys
from support.head_rounds import rounds

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)
V, NEW = TARGET.config.vocab_size, 20


def states(model, tokens, count):
    """Return the output of the first `count` layers, ``[B, S, E]``."""
    cache = model.new_cache(*tokens.shape)
    return model.forward(tokens, cache, jnp.zeros(len(tokens), jnp.int32), layers=range(count))[0]


def test_adapter_matches_torch():
    pytest.importorskip("torch")
    from support import heads_torch as published

    adapter, x = heads.kangaroo(TARGET).adapter, np.random.default_rng(1).normal(size=(3, 7, 16)).astype(np.float32)
    found, _ = adapter(jnp.asarray(x), adapter.new_cache(3, 7), jnp.zeros(3, jnp.int32))
    np.testing.assert_allclose(found, published.kangaroo(adapter, x), atol=2e-5)


TREE = jspec.Tree.branching((2, 1, 2))


@pytest.mark.parametrize(
    ("make", "length", "rule"),
    [
        pytest.param(lambda drafter: drafter, jspec.WhileConfident(3, 0.4), "block", marks=pytest.mark.slow),
        pytest.param(lambda drafter: jspec.TreeDrafter(drafter, TREE), 3, "traversal", marks=pytest.mark.slow),
        (lambda drafter: jspec.DynamicTreeDrafter(drafter, num_nodes=7, max_depth=3, width=3), 3, "coupled"),
    ],
    ids=["varying", "tree", "search"],
)
def test_adapter_cache_matches_text(prompts, make, length, rule):
    """After every round, the cache matches the sequence without its last token."""
    drafter, compared = heads.kangaroo(TARGET), 0
    adapter = drafter.adapter

    @jax.jit
    def read(tokens):
        x = states(TARGET, tokens, 1)
        return adapter(x, adapter.new_cache(*tokens.shape), jnp.zeros(len(tokens), jnp.int32))[1]

    for state in rounds(TARGET, make(drafter), prompts([5, 1, 3, 9], vocab_size=V), length, rule, [NEW, 7, NEW, 1]):
        cache = (state.drafter if isinstance(length, jspec.WhileConfident) else state.drafter[0]).cache
        cache, expected, lengths, done = jax.device_get((cache, read(state.tokens), state.lengths, state.done))
        for row in np.flatnonzero(~done):
            upto = lengths[row] - 1
            np.testing.assert_allclose(cache.keys[0][row, ..., :upto], expected.keys[0][row, ..., :upto], atol=1e-5)
            np.testing.assert_allclose(cache.values[0][row, :, :upto], expected.values[0][row, :, :upto], atol=1e-5)
            compared += 1
    assert compared > 12


@pytest.mark.parametrize(
    "kind", ["chain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("varying", "tree", "search"))]
)
def test_exact_adapter_is_always_accepted(kind):
    """The target's last layer is attention only, so the adapter is right if its cache is."""
    target, last = toys.tiny_llama(0, 2), toys.tiny_llama(0, 2).layers[1]
    target.layers[1].mlp.down_proj.weight.set_value(jnp.zeros_like(last.mlp.down_proj.weight[...]))
    drafter = heads.kangaroo(target)
    for name in ("input_layernorm", "self_attn"):
        setattr(drafter.adapter, name, getattr(target.layers[1], name))
    drafter.adapter.norm = target.norm
    options = {
        "chain": {},
        "varying": {"num_draft_tokens": jspec.UpTo(3)},
        "tree": {"num_draft_tokens": None},
        "search": {"num_draft_tokens": None, "accept": "coupled"},
    }[kind]
    whole = {
        "tree": lambda: jspec.TreeDrafter(drafter, TREE),
        "search": lambda: jspec.DynamicTreeDrafter(drafter, num_nodes=12, max_depth=3, width=4),
    }
    heads.check_always_right(target, whole.get(kind, lambda: drafter)(), temperature=0.8, **options)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (lambda: heads.kangaroo(TARGET, 3), "features of KangarooDrafter holds 3; expected whole numbers from 0 to 2 "),
        (lambda: heads.kangaroo(TARGET, 0), "num_layers must be an int of at least 1; got 0"),
        (
            lambda: jspec.KangarooDrafter(other_size(), 1),
            "made for a hidden size of 24, but the target's is 16; use a drafter",
        ),
    ],
)
def test_invalid_drafters_are_rejected(prompts, drafter, message):
    with pytest.raises(ValueError, match=message):
        jspec.speculative_generate(TARGET, drafter(), *prompts([3], vocab_size=V), max_new_tokens=8)


def other_size():
    return Adapter(dataclasses.replace(TARGET.config, hidden_size=24), jnp.float32, heads.nnx.Rngs(0))
