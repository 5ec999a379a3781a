"""PaSS: the next draft tokens are drawn from the target's states at vectors after the text, read afresh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from support import heads, toys
from support.embeddings import longer_vocabulary
from support.head_rounds import rounds

pytestmark = pytest.mark.usefixtures("quick_compile")
TARGET = toys.tiny_llama(0, 2)
V, NEW = TARGET.config.vocab_size, 20


def test_all_vectors_follow_every_draft_token():
    assert heads.vectors(TARGET, 1).tree.parents == (0, 0, 1)
    assert heads.vectors(TARGET, 2).tree.parents == (0, 1, 0, 3, 1, 5, 2, 7)
    assert heads.vectors(TARGET, 3).tree.size == 3 + 4 * 3


def test_states_match_model_with_vectors_in_vocabulary(prompts):
    """The states match a model whose vocabulary has the vectors, after each round's text without its last token."""
    drafter = heads.vectors(TARGET, 2)
    model, compared = longer_vocabulary(drafter.embeddings), 0
    read = jax.jit(lambda tokens: model.forward(tokens, model.new_cache(*tokens.shape), jnp.zeros(4, jnp.int32))[0])
    states = list(rounds(TARGET, drafter, prompts([5, 1, 3, 9], vocab_size=V), 4, "rejection", [NEW, 7, NEW, 1]))
    assert not states[0].drafter.known.any()
    for state in states[1:]:
        last = np.array(state.lengths) - 1
        text = np.array(state.tokens)
        for j in range(2):
            text[np.arange(4), last + j] = V + j
        whole = read(jnp.asarray(text))
        for row in np.flatnonzero(~state.done):
            expected = whole[row, last[row] : last[row] + 2]
            np.testing.assert_allclose(state.drafter.hidden[row], expected, atol=1e-5)
            compared += 1
    assert compared > 20


@pytest.mark.parametrize("accept", ["rejection", pytest.param("coupled", marks=pytest.mark.slow)])
def test_exact_vectors_are_always_accepted(accept):
    """The target's distribution is the same everywhere, and a round takes one pass."""
    target = heads.markov_llama(np.tile(np.random.default_rng(0).normal(size=V), (V, 1)))
    passes, drafter = heads.counted(target), jspec.PassDrafter.of_token(target, 3, 2)
    batch = [[1, 2], [4, 0]], [2, 1], jax.random.split(jax.random.key(0), 2)
    out = jspec.speculative_generate(target, drafter, *batch, max_new_tokens=22, accept=accept)
    jax.effects_barrier()
    assert out.stats.judged.sum() == 28 and (out.stats.acceptance_rate == 1).all()
    assert out.stats.rounds.tolist() == [8, 8]  # the first one has no draft
    assert passes == [2] + 8 * [9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: jspec.PassDrafter.of_token(TARGET, 8, 2),
            "token_id must be one of the target's tokens, 0 to 7; got 8",
        ),
        (lambda: jspec.PassDrafter.of_token(TARGET, 0.5, 2), "0 to 7; got 0.5"),
        (lambda: jspec.PassDrafter.of_token(TARGET, 0, 0), "count must be an int of at least 1; got 0"),
    ],
)
def test_invalid_arguments_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_pass_drafter_cannot_branch(prompts):
    with pytest.raises(TypeError, match="draft is of type PassDrafter, which cannot branch"):
        jspec.TreeDrafter(heads.vectors(TARGET), jspec.Tree.branching((2, 2)))


def test_different_hidden_size_is_rejected(prompts):
    drafter = jspec.PassDrafter(jnp.zeros((2, 24)))
    with pytest.raises(ValueError, match=r"embeddings of PassDrafter are .* \[2, 24\]; expected an array of shape"):
        jspec.speculative_generate(TARGET, drafter, *prompts([3], vocab_size=V), max_new_tokens=8)
