"""EAGLE heads as drafters: after every round, they have read the sequence with the target's own hidden states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.core.keys import draft_noise
from jspec.decoding.program import start
from jspec.decoding.round import decode_round
from jspec.drafters import EagleDrafter
from jspec.drafters.base import Context, TargetView
from jspec.drafters.duck_length import as_draft_length
from support import drafters, eagle_heads, toys

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET, V = toys.tiny_llama(0, 3), 8
KINDS = {
    "1": {"generation": 1},
    "1, biased, few tokens": {"generation": 1, "fc_bias": True, "draft_vocab_size": 5, "own_head": True},
    "3": {"generation": 3},
    "3.1, few tokens": {"generation": 3, "fc_norm": True, "norm_output": True, "draft_vocab_size": 5, "own_head": True},
    "3, all its own": {
        "generation": 3,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "own_head": True,
        "own_embedding": True,
    },
}
TREES = {
    "chain": (lambda one: one, 3, "rejection"),
    "varying": (lambda one: one, jspec.WhileConfident(3, 0.5), "block"),
    "tree": (lambda one: jspec.TreeDrafter(one, jspec.Tree.branching((2, 1, 2))), 3, "traversal"),
    "search": (lambda one: jspec.DynamicTreeDrafter(one, 6, 3, 2), 3, "coupled"),
}


def read_whole(head, tokens):
    """Return the states after every token but the first, ``[B, S - 1, E]``, of whole sequences at once."""
    batch, size = tokens.shape
    zeros = jnp.zeros(batch, jnp.int32)
    features = TARGET.forward_with_features(tokens, TARGET.new_cache(batch, size), zeros, head.config.features)[1]
    pairs = head.embed(tokens[:, 1:], TARGET), head.fuse(features[:, :-1], TARGET)
    return head.forward(*pairs, head.new_cache(batch, size - 1), zeros)[0]


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("1", "chain"),
        ("3", "varying"),
        ("3.1, few tokens", "tree"),
        ("3, all its own", "search"),
        *(pytest.param(kind, tree, marks=pytest.mark.slow) for kind in KINDS for tree in TREES),
    ],
)
def test_head_state_matches_target_states_of_text(prompts, kind, tree):
    """This holds with rejected draft tokens, row ends and limits, and from one-token prompts on."""
    wrap, length, rule = TREES[tree]
    head = eagle_heads.eagle(TARGET, **KINDS[kind])
    drafter, length = wrap(EagleDrafter(head)), as_draft_length(length)
    tokens, lengths, keys = prompts([5, 1, 3, 9], vocab_size=V)
    tokens = np.where(np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None], tokens, 0)
    transforms = toys.both_transforms(jspec.SamplingParams(), 4)
    params = toys.request(keys, jnp.asarray(lengths), jnp.array([20, 7, 20, 1]), *transforms)
    state, _ = jax.jit(lambda: start(TARGET, drafter, params, jnp.asarray(tokens), 20, length))()
    decode = jax.jit(lambda state: decode_round(TARGET, drafter, RULES[rule], length, params, state)[0])
    read = jax.jit(functools.partial(read_whole, head))

    def inner(state):
        return state.drafter if tree in ("chain", "varying") else state.drafter[0]

    assert inner(state).known.tolist() == [True, False, True, True]
    accepted = 0
    while not state.done.all():
        before, state = state, decode(state)
        accepted += int(jnp.maximum(state.lengths - before.lengths - 1, 0).sum())
        whole, found, lengths, done = jax.device_get((read(state.tokens), inner(state), state.lengths, state.done))
        for row in np.flatnonzero(~done):
            np.testing.assert_allclose(found.states[row, 0], whole[row, lengths[row] - 2], atol=2e-5)
    assert accepted


def test_exact_head_is_always_accepted(prompts):
    """The target's next token depends on the last one alone, whose embedding the head passes on as its state."""
    target = toys.tiny_llama(0, 1)
    columns = target.embed_tokens.weight[...]
    target.embed_tokens.weight.set_value(columns / jnp.sqrt(jnp.mean(columns**2, axis=0)))  # nothing left to normalise
    head = eagle_heads.eagle(target, generation=1)
    head.fc.weight.set_value(jnp.eye(32, 16))
    for layer in (target.layers[0], head):
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight.set_value(jnp.zeros_like(linear.weight[...]))
    batch = prompts([4, 2], vocab_size=V)
    for rule in ("rejection", "block", "coupled"):
        out = jspec.speculative_generate(
            target, EagleDrafter(head), *batch, num_draft_tokens=3, max_new_tokens=12, accept=rule
        )
        np.testing.assert_array_equal(out.stats.rounds, 3)


def test_reduced_vocabulary_maps_to_target_ids(prompts):
    """A head for tokens 2, 5 and 7 drafts only these, for any order of its rows."""
    head = eagle_heads.eagle(TARGET, generation=3, draft_vocab_size=3, own_head=True)
    head.draft_ids.set_value(jnp.array([3, 3, 1, 3, 3, 0, 3, 2], jnp.int32))
    states = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 16)), jnp.float32)
    found, few = head.logits(states, TARGET), head.draft_logits(states, TARGET)
    np.testing.assert_array_equal(found[..., [5, 2, 7]], few)
    assert np.isneginf(found[..., [0, 1, 3, 4, 6]]).all()
    options = {"max_new_tokens": 24, "accept": "coupled"}
    out = jspec.speculative_generate(TARGET, EagleDrafter(head), *prompts([4], vocab_size=V), **options, record=True)
    guesses = np.asarray(out.record.tokens)[np.asarray(out.record.fates) > 0]
    assert set(guesses.tolist()) == {2, 5, 7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 24}, "a target whose hidden size is 24, but this target's is 16; use the head"),
        (
            {"layer": dataclasses.replace(toys.llama_config(1), vocab_size=9)},
            "vocabulary has 9 tokens and the target's 8",
        ),
        ({"features": (0, 4)}, "features of EagleDrafter holds 4; expected whole numbers from 0 to 3 "),
    ],
)
def test_head_for_another_target_is_rejected(prompts, change, message):
    head = eagle_heads.eagle(TARGET, **({"generation": 3} | change))
    with pytest.raises(ValueError, match=message):
        jspec.speculative_generate(TARGET, EagleDrafter(head), *prompts([3], vocab_size=V), max_new_tokens=8)


def test_model_in_place_of_head_is_rejected(prompts):
    with pytest.raises(TypeError, match=r"head is of type Llama; pass a jspec\.drafters\.heads\.eagle_module\.Eagle"):
        jspec.speculative_generate(TARGET, EagleDrafter(TARGET), *prompts([3], vocab_size=V), max_new_tokens=8)


@pytest.mark.parametrize("name", ["eagle", "eagle 3", "medusa", "hydra"])
def test_head_drafts_nothing_after_one_token_prompt(name):
    """In a mixture with a drafter that does draft, all distributions are then that drafter's."""
    target, draft = toys.tiny_llama(0, 2), toys.tiny_llama(1, 1)
    mixed = jspec.MixtureDrafter(drafters.make(name, target, draft), draft, 0.5)
    batch = jnp.array([[5], [6]]), jnp.array([1, 1]), jax.random.split(jax.random.key(0), 2)
    transforms = toys.both_transforms(jspec.SamplingParams(), 2)

    @jax.jit
    def program(drafter):
        params = toys.request(batch[2], batch[1], 5, *transforms)
        state, _ = start(target, drafter, params, batch[0], 5, as_draft_length(3))
        noise = draft_noise(batch[2], jnp.ones((2, 1), int) + jnp.arange(3), 8, 1)
        context = Context(
            state.tokens, state.lengths, noise, transforms[1], None, TargetView(target, state.cache, 1), 8
        )
        return drafter.propose(state.drafter, context, 3)[0]

    one, other = program(mixed), program(jspec.ModelDrafter(draft))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.probs, other.probs, atol=1e-6)
