"""Vectors that the target reads in place of tokens: their hidden states reach the drafter and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.acceptance.walk import end_of
from jspec.core.tree import Tree
from jspec.decoding.program import start
from jspec.decoding.round import decode_round
from jspec.drafters import Draft, FallbackDrafter, NGramDrafter
from jspec.drafters.duck_length import as_draft_length
from jspec.drafters.standalone.model import as_drafter
from support import toys
from support.embeddings import TARGET, longer_vocabulary

pytestmark = pytest.mark.usefixtures("quick_compile")
V, AHEAD = 8, 2
# A chain of two draft tokens, with two consecutive vectors after the last token and after each draft token.
TREE = Tree((0, 1, 0, 3, 1, 5, 2, 7))
NODES = np.array([[3, 4], [5, 6], [7, 8]])  # the vectors after each node of the chain


@functools.partial(jax.tree_util.register_dataclass, data_fields=["embeddings"], meta_fields=["foreign"])
@dataclasses.dataclass(frozen=True)
class LookAhead:
    """A drafter that drafts what the target predicts at look-ahead embeddings after the last accepted token (PaSS)."""

    embeddings: jax.Array
    foreign: int = V  # the first id of the vectors
    vocab_size = None
    max_positions = None
    tree = TREE

    def init(self, tokens, num_slots):
        return jnp.zeros((len(tokens), AHEAD), jnp.int32), jnp.zeros((len(tokens), AHEAD, self.embeddings.shape[1]))

    def propose(self, state, context, num_draft_tokens):
        rows = len(context.lengths)
        ids = jnp.tile(self.foreign + jnp.arange(AHEAD), (rows, len(NODES)))
        laws = jax.nn.one_hot(state[0], context.vocab_size)
        tokens = jnp.concatenate([state[0], ids], axis=1)
        return Draft(tokens, jnp.pad(laws, ((0, 0), (0, ids.shape[1]), (0, 0))), self.tree), state

    def commit(self, state, draft, verdict, hidden):
        end = jnp.asarray(NODES)[end_of(verdict.num_accepted, verdict.path)]
        ahead = jnp.take_along_axis(hidden, end[..., None], axis=1).astype(jnp.float32)
        return TARGET.logits(ahead).argmax(-1).astype(jnp.int32), ahead


@functools.partial(jax.tree_util.register_dataclass, data_fields=["embeddings"], meta_fields=["foreign"])
@dataclasses.dataclass(frozen=True)
class Chain(LookAhead):
    """A drafter that wrongly marks its vectors as draft tokens."""

    tree = None

    def propose(self, state, context, num_draft_tokens):
        tokens = jnp.tile(self.foreign + jnp.arange(AHEAD), (len(context.lengths), 1))
        return Draft(tokens, None, None, jnp.ones(tokens.shape, bool)), state

    def commit(self, state, draft, verdict, hidden):
        return state


def drafter(seed=0, **options):
    return LookAhead(jax.random.normal(jax.random.key(seed), (AHEAD, TARGET.config.hidden_size)), **options)


def test_drafter_receives_states_at_vectors(prompts):
    """The drafter gets the vectors' hidden states as in a fresh pass over each round's text without its last token.

    The fresh pass uses a model whose vocabulary includes the vectors.
    """
    one, length = as_drafter(drafter()), as_draft_length(TREE.max_depth)
    tokens, lengths, keys = prompts([5, 1, 3], vocab_size=V)
    tokens = jnp.where(np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None], tokens, 0)
    params = toys.request(keys, jnp.asarray(lengths), jnp.full(3, 20), *toys.both_transforms(jspec.SamplingParams(), 3))
    state, _ = jax.jit(lambda: start(TARGET, one, params, tokens, 20, length))()
    decode = jax.jit(lambda state: decode_round(TARGET, one, RULES["rejection"], length, params, state))
    model, kept = longer_vocabulary(one.embeddings), 0
    read = jax.jit(lambda tokens: model.forward(tokens, model.new_cache(*tokens.shape), jnp.zeros(1, jnp.int32))[0])
    for _ in range(4):
        before = state.lengths
        state, new = decode(state)
        kept += int(new.accepted.sum())
        for row in range(3):
            end = int(before[row]) + int(new.accepted[row])  # the text with the accepted tokens, without the next one
            text = np.append(np.array(state.tokens[row, :end]), [V, V + 1])
            whole = np.array(read(jnp.asarray(np.pad(text, (0, 40 - text.size)))[None]))
            np.testing.assert_allclose(state.drafter[1][row], whole[0, end : end + 2], atol=1e-5)
    assert kept


@pytest.mark.parametrize("how", ["float32", "int8", "bfloat16"])
def test_vectors_do_not_change_output(prompts, how):
    """Under "coupled" with penalties, output equals plain decoding's, because the vectors' nodes are not tokens."""
    batch = prompts([4, 2], vocab_size=V)
    model = jspec.quantize(TARGET) if how == "int8" else toys.tiny_llama(0, 2)
    if how == "bfloat16":
        model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    options = {"max_new_tokens": 24, "sampling": jspec.SamplingParams(repetition_penalty=1.3, temperature=0.8)}
    plain = jspec.generate(model, *batch, **options)
    out = jspec.speculative_generate(model, drafter(), *batch, accept="coupled", record=True, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.accepted.sum() and not out.record.fates[:, :, 2:].any()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LookAhead(jnp.zeros((2, 5))), ValueError, r"of LookAhead are a \w+ of shape \[2, 5\]; expected an"),
        (
            lambda: LookAhead(jnp.zeros(8)),
            ValueError,
            r"of shape \[8\]; expected an array of shape \[M, 16\], with M at least 1",
        ),
        (lambda: LookAhead([[0.0] * 16]), ValueError, r"are a list of shape \[\]; expected an array"),
        (lambda: FallbackDrafter(NGramDrafter(), drafter()), TypeError, "which drafts a tree"),
    ],
)
def test_invalid_embeddings_are_rejected(prompts, make, error, message):
    with pytest.raises(error, match=message):
        jspec.speculative_generate(TARGET, make(), *prompts([3], vocab_size=V), max_new_tokens=8)


def test_embeddings_require_fixed_draft_length(prompts):
    chain = Chain(drafter().embeddings)
    with pytest.raises(ValueError, match="Chain has embeddings, which need drafts of one length; use a"):
        jspec.speculative_generate(
            TARGET, chain, *prompts([3], vocab_size=V), max_new_tokens=8, num_draft_tokens=jspec.UpTo(3)
        )


@pytest.mark.parametrize(("checks", "error"), [(False, ValueError), (True, jax.errors.JaxRuntimeError)])
def test_vectors_marked_as_draft_tokens_are_rejected(prompts, checks, error):
    """A drafter that marks vectors as draft tokens raises an error, in debug mode as well."""
    with jax.enable_checks(checks), pytest.raises(error, match="outside the vocabulary of 8 tokens"):
        out = jspec.speculative_generate(
            TARGET,
            Chain(drafter().embeddings),
            *prompts([3], vocab_size=V),
            max_new_tokens=8,
            num_draft_tokens=2,
            accept="coupled",
        )
        jax.block_until_ready(out)


def test_target_without_embeddings_support_is_rejected(prompts):
    with pytest.raises(TypeError, match="LookAhead has embeddings for the target, but MarkovModel has no"):
        jspec.speculative_generate(toys.markov_pair(0)[0], drafter(), *prompts([3], vocab_size=V), max_new_tokens=8)


def test_ids_beyond_vectors_do_not_change_output(prompts):
    """Ids beyond the vectors leave the output unchanged, because they are not draft tokens."""
    batch = prompts([4], vocab_size=V)
    with jax.enable_checks(True):
        out = jspec.speculative_generate(TARGET, drafter(foreign=V + 1), *batch, max_new_tokens=8, accept="coupled")
    np.testing.assert_array_equal(out.tokens, jspec.generate(TARGET, *batch, max_new_tokens=8).tokens)
