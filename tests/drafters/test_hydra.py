"""Hydra heads: they compute what PyTorch does, and every tree node has its own branch before it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.drafters.base import Context, TargetView
from jspec.drafters.heads.base import LastState
from support import heads, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)
E, V = TARGET.config.hidden_size, TARGET.config.vocab_size


@pytest.mark.parametrize("blocks", [1, 3])
def test_logits_match_torch(blocks):
    pytest.importorskip("torch")
    from support import heads_torch as published

    drafter, rng = heads.hydra(TARGET, 3, blocks), np.random.default_rng(1)
    for i, ours in enumerate(drafter.heads):
        z = rng.normal(size=(4, 5, (i + 2) * E)).astype(np.float32)
        np.testing.assert_allclose(ours(jnp.asarray(z), TARGET), published.hydra(ours, z, i + 1), atol=2e-5)


def test_missing_head_uses_target_head():
    own, shared = heads.hydra(TARGET), heads.hydra(TARGET, own_head=False)
    z = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, 2 * E)), jnp.float32)
    own.heads[0].lm_head.weight.set_value(TARGET.lm_head.weight[...])
    own.heads[0].bias.set_value(jnp.zeros(V))
    for name in ("linear", "residual"):
        setattr(shared.heads[0], name, getattr(own.heads[0], name))
    shared.heads[0].blocks = own.heads[0].blocks
    np.testing.assert_allclose(shared.heads[0](z, TARGET), own.heads[0](z, TARGET), atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["chain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("varying", "tree", "search"))]
)
def test_exact_heads_are_always_accepted(kind):
    """A token's distribution depends on the previous token, which the heads must receive, at any temperature."""
    table = np.random.default_rng(2).normal(size=(V, V)) * 2
    target, drafter = heads.markov_llama(table), heads.hydra(TARGET, 3, 1)
    for head in drafter.heads:  # use only the last of the embeddings
        head.linear.weight.set_value(jnp.zeros_like(head.linear.weight[...]))
        head.linear.bias.set_value(jnp.zeros(E))
        last = jnp.concatenate([jnp.zeros((head.linear.weight[...].shape[0] - E, E)), jnp.eye(E)])
        head.residual.weight.set_value(last)
        head.residual.bias.set_value(jnp.zeros(E))
        head.bias.set_value(jnp.zeros(V))
        head.lm_head.weight.set_value(jnp.pad(jnp.asarray(table, jnp.float32), ((0, E - V), (0, 0))))
    check = functools.partial(heads.check_always_right, target, temperature=0.8)
    if kind == "tree":
        check(jspec.TreeDrafter(drafter, jspec.Tree.branching((2, 1, 2))), num_draft_tokens=None)
    elif kind == "search":  # verified with the target's noise, with which it is also drawn
        whole = jspec.DynamicTreeDrafter(drafter, num_nodes=12, max_depth=3, width=4)
        check(whole, num_draft_tokens=None, accept="coupled")
    else:
        check(drafter, num_draft_tokens=3 if kind == "chain" else jspec.UpTo(3))


def test_every_node_reads_its_own_branch():
    drafter, rng, tree = heads.hydra(TARGET), np.random.default_rng(3), jspec.Tree.branching((2, 3, 1))
    text, lengths = jnp.asarray(rng.integers(V, size=(2, 6))), jnp.array([4, 6])
    view = Context(text, lengths, None, None, None, TargetView(TARGET, None, 1), V)
    state = LastState(jnp.asarray(rng.normal(size=(2, E)), jnp.float32), jnp.array([True, True]))
    embedded = np.array(TARGET.embed_tokens(jnp.arange(V)[None])[0])
    drafted = jnp.asarray(rng.integers(V, size=(2, tree.size)))
    logits, carry = drafter.begin(state, view, tree)
    found = [logits[:, None]]
    for depth in (1, 2):
        level = np.flatnonzero(tree.offsets == depth)
        logits, carry = drafter.extend(carry, drafted[:, level - 1], tree.level(depth), view)
        found.append(logits)
    found = jnp.concatenate(found, axis=1)
    for row, node in np.ndindex(2, found.shape[1]):
        branch = [int(text[row, lengths[row] - 1]), *(int(drafted[row, at - 1]) for at in tree.paths[node] if at)]
        z = np.concatenate([TARGET.norm(state.hidden[row]), *embedded[branch]])
        expected = drafter.heads[len(branch) - 1](jnp.asarray(z)[None, None], TARGET)
        np.testing.assert_allclose(found[row, node], expected[0, 0], atol=1e-4)


def test_heads_are_differentiable_over_whole_sequences():
    """A trainer reads whole sequences with the same heads that draft."""
    drafter = heads.hydra(TARGET, 2)
    gradient = jax.grad(lambda drafter, z: drafter.heads[1](z, TARGET).sum())(drafter, jnp.ones((2, 7, 3 * E)))
    assert jnp.abs(gradient.heads[1].linear.weight[...]).sum() and not jnp.abs(gradient.heads[0].bias[...]).sum()
