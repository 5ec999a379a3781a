"""Trained heads: they see the sequence's hidden states, and heads that do not fit the target are rejected."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from support import heads
from support.head_rounds import NEW, TARGET, V, rounds

pytestmark = pytest.mark.usefixtures("quick_compile")
HEADS = {
    "medusa": heads.medusa,
    "hydra": heads.hydra,
    "hydra, shared": lambda target: heads.hydra(target, own_head=False),
    "blockwise": heads.blockwise,
}


@pytest.mark.parametrize(
    ("tree", "length", "rule"),
    [
        pytest.param(None, jspec.WhileConfident(3, 0.4), "block", marks=pytest.mark.slow),
        (jspec.Tree.branching((2, 1, 2)), 3, "traversal"),
    ],
    ids=["varying", "tree"],
)
def test_heads_receive_target_state_before_last_token(prompts, tree, length, rule):
    """Before every round, they have the second-to-last token's state, even with rejected tokens, EOS and limits."""
    drafter = heads.medusa(TARGET)
    whole = drafter if tree is None else jspec.TreeDrafter(drafter, tree)
    read = jax.jit(lambda tokens: TARGET.forward(tokens, TARGET.new_cache(*tokens.shape), jnp.zeros(4, jnp.int32))[0])
    batch = prompts([5, 1, 3, 9], vocab_size=V)
    first, compared = True, 0
    for state in rounds(TARGET, whole, batch, length, rule, [NEW, 7, NEW, 1], (5,)):
        seen = state.drafter if tree is None else state.drafter[0]
        assert seen.known.tolist() == [True, not first, True, True]
        expected = read(state.tokens)
        for row in np.flatnonzero(seen.known & ~state.done):
            np.testing.assert_allclose(seen.hidden[row], expected[row, state.lengths[row] - 2], atol=1e-5)
            compared += 1
        first = False
    assert compared > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("kind", ["tree", "search"])
def test_tree_output_equals_plain_decoding(prompts, name, kind):
    """This holds under "coupled", with penalties."""
    batch, drafter = prompts([4, 1, 6], vocab_size=V), HEADS[name](TARGET)
    whole = (
        jspec.TreeDrafter(drafter, jspec.Tree.branching((3, 2, 1)))
        if kind == "tree"
        else jspec.DynamicTreeDrafter(drafter, num_nodes=7, max_depth=3, width=3)
    )
    options = {"max_new_tokens": NEW, "sampling": jspec.SamplingParams(repetition_penalty=1.2, temperature=0.8)}
    with jax.enable_checks(kind == "tree"):
        out = jspec.speculative_generate(TARGET, whole, *batch, accept="coupled", **options)
    np.testing.assert_array_equal(out.tokens, jspec.generate(TARGET, *batch, **options).tokens)
    assert out.stats.accepted.sum()


@pytest.mark.slow
def test_one_token_prompt_has_no_draft_in_first_round(prompts):
    out = jspec.speculative_generate(
        TARGET, heads.medusa(TARGET), *prompts([1, 2], vocab_size=V), max_new_tokens=1, num_draft_tokens=jspec.UpTo(2)
    )
    assert out.stats.drafted.tolist() == [0, 1]


@pytest.mark.parametrize("name", HEADS)
def test_draft_longer_than_number_of_heads_is_rejected(prompts, name):
    drafter = HEADS[name](TARGET)
    for whole, length in ((drafter, {"num_draft_tokens": 4}), (jspec.TreeDrafter(drafter, jspec.Tree.chain(4)), {})):
        with pytest.raises(
            ValueError, match="Drafter has 3 heads, but a draft of 4 consecutive tokens needs one head per token; dra"
        ):
            jspec.speculative_generate(TARGET, whole, *prompts([3], vocab_size=V), max_new_tokens=8, **length)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"vocab_size": 9}, "vocabulary has 9 tokens and the target's 8"),
        (
            {"hidden_size": 24},
            "Drafter was made for a hidden size of 24, but the target's is 16; use a drafter that was trained",
        ),
    ],
)
def test_heads_for_another_target_are_rejected(prompts, name, size, message):
    other = jspec.Llama(dataclasses.replace(TARGET.config, **size), rngs=nnx.Rngs(0))
    drafter = HEADS[name](other)
    if drafter.vocab_size is None and "vocab_size" in size:
        return  # it drafts with the target's own head
    with pytest.raises(ValueError, match=message):
        jspec.speculative_generate(TARGET, drafter, *prompts([3], vocab_size=V), max_new_tokens=8, num_draft_tokens=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jspec.MedusaDrafter.untrained(TARGET, 0, rngs=nnx.Rngs(0)), "num_heads must be an int of at least 1"),
        (lambda: jspec.HydraDrafter.untrained(TARGET, 0, rngs=nnx.Rngs(0)), "num_heads must be an int of at least 1"),
        (
            lambda: jspec.HydraDrafter.untrained(TARGET, 2, 0, rngs=nnx.Rngs(0)),
            "num_blocks must be an int of at least 1",
        ),
        (
            lambda: jspec.BlockwiseDrafter.untrained(TARGET, 0, rngs=nnx.Rngs(0)),
            "num_heads must be an int of at least 1",
        ),
    ],
)
def test_invalid_sizes_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
