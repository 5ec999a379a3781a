"""Drafters that draft their own trees: each against a plain implementation, and what they reject."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jspec
from jspec import MultiDrafter, NGramDrafter, TokenRecyclingDrafter, Tree
from jspec.core.types import Draft, Verdict, pytree
from jspec.drafters.base import Context
from jspec.drafters.signals import TargetSignals
from support import toys
from support.own_trees import context, matches, propose

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = toys.tiny_llama(0)
TREE = Tree((0, 1, 0, 2, 0, 3, 1, 7))  # depth first, and ragged


def trie(tokens, tree, max_ngram, min_ngram):
    """Return each node's draft token, or None, by brute force."""
    texts = []
    for end in matches(tokens, max_ngram, min_ngram)[: 4 * tree.max_width]:
        text = list(tokens)
        for i in range(tree.max_depth):
            text.append(text[end + 1 + i])
        texts.append(tuple(text[len(tokens) :]))
    paths = {0: ()}
    for node, parent in enumerate(tree.parents, 1):
        above = paths[parent]
        going_on = [] if above is None else [text for text in texts if text[: len(above)] == above]
        next_tokens = dict.fromkeys(text[len(above)] for text in going_on)  # in this order, without duplicates
        own = list(next_tokens)[tree.sibling_ranks[node] :][:1]
        paths[node] = (*above, *own) if own else None
    return [paths[node] and paths[node][-1] for node in range(1, tree.size + 1)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=16), st.sampled_from([(3, 1), (2, 2)]))
def test_tree_lookup_drafts_trie_of_continuations(tokens, sizes):
    drafter = NGramDrafter(*sizes, TREE)
    row = np.array([*tokens, *[7] * (16 - len(tokens))], np.int32)
    draft, _ = propose(drafter, (), context(row[None], [len(tokens)], 8), TREE.max_depth)
    guesses, laws = draft.tokens[0], draft.probs[0]
    expected = trie(tokens, drafter.tree, *sizes)
    for guess, law, wanted in zip(guesses.tolist(), np.asarray(laws), expected, strict=True):
        np.testing.assert_array_equal(law, np.zeros(8) if wanted is None else np.eye(8)[wanted])
        assert wanted in (None, guess)


def test_tree_lookup_with_chain_equals_chain_lookup():
    tokens = np.random.default_rng(0).integers(3, size=(20, 16)).astype(np.int32)
    asked = context(tokens, np.arange(20) % 16 + 1, 8)
    chain, tree = (propose(one, (), asked, 3)[0] for one in (NGramDrafter(), NGramDrafter(tree=Tree.chain(3))))
    assert 0 < tree.probs.sum() < tree.tokens.size
    np.testing.assert_array_equal(tree.probs, chain.probs)


def test_recycling_table_holds_latest_top_tokens():
    """Table rows, some shorter than the vocabulary allows, match a dictionary. The first of equal tokens counts."""
    rng, drafter, rows, vocab_size = np.random.default_rng(0), TokenRecyclingDrafter(12), 2, 6
    tree, state, known = drafter.tree, drafter.init(jnp.zeros((rows, 3), jnp.int32), 40), [{}, {}]
    text, lengths = rng.integers(vocab_size, size=(rows, 40)).astype(np.int32), np.array([1, 4])
    seen, commit = 0, jax.jit(drafter.commit)
    for _ in range(8):
        draft, state = propose(drafter, state, context(text, lengths, vocab_size), tree.max_depth)
        top_tokens = rng.permuted(np.tile(np.arange(vocab_size), (rows, tree.size + 1, 1)), axis=-1)
        for b in range(rows):
            tokens = text[b, : lengths[b]].tolist()
            guesses = {0: tokens[-1]}
            for node, parent in enumerate(tree.parents, 1):
                above = guesses[parent]
                ends = [end for end in matches([*tokens[:-1], above], 1, 1)] if above is not None else []
                copied = [tokens[ends[0] + 1]] if ends else []
                guesses[node] = next(iter(known[b].get(above, copied)[tree.sibling_ranks[node] :]), None)
                law = np.zeros(vocab_size) if guesses[node] is None else np.eye(vocab_size)[guesses[node]]
                np.testing.assert_array_equal(draft.probs[b, node - 1], law)
                seen += guesses[node] is not None
            for node in reversed(range(tree.size + 1)):
                if guesses[node] is not None:
                    known[b][guesses[node]] = top_tokens[b, node].tolist()
        state = commit(state, draft, None, TargetSignals(None, top_tokens=jnp.asarray(top_tokens, jnp.int32)))
        lengths = lengths + rng.integers(1, 4, size=rows)
    assert seen > 100


def test_recycling_evicts_oldest_tokens(monkeypatch):
    monkeypatch.setattr("jspec.drafters.standalone.recycling._ROWS", 8)
    drafter = TokenRecyclingDrafter(3)
    state = drafter.init(jnp.zeros((1, 1), jnp.int32), 9)
    for first in range(3):
        draft, state = propose(drafter, state, context([[first]], [1], 16), drafter.tree.max_depth)
        state = drafter.commit(state, draft, None, TargetSignals(None, top_tokens=jnp.full((1, 4, 8), 15)))
    known = set(state[0].tokens[0].tolist())
    assert state[0].tokens.shape == (1, 8) and {1, 2} <= known and 0 not in known


@jax.jit
def in_turn(drafter, state, asked):
    """Return a draft, and the state after another drafter's branch was accepted."""
    draft, state = drafter.propose(state, asked, 2)
    verdict = Verdict(jnp.full(2, 2), asked.tokens[:, 0], path=jnp.tile(jnp.array([1, 4]), (2, 1)))
    return draft, drafter.commit(state, draft, verdict, TargetSignals(jnp.zeros((2, 7, 1))))


def test_multi_drafter_chains_equal_single_drafts():
    """Each drafts with its own noise and reads what it has not read: a round's three tokens are not from its draft."""
    rng, part = np.random.default_rng(0), jspec.ModelDrafter(MODEL)
    drafter = MultiDrafter([NGramDrafter(), MODEL, MODEL], 2)
    text = jnp.asarray(rng.integers(8, size=(2, 16)), jnp.int32)
    state, both = drafter.init(text[:, :4], 32), toys.both_transforms(jspec.SamplingParams(), 2)[1]
    for length in (4, 7, 10):
        noise = jnp.asarray(rng.gumbel(size=(2, 2, 3, 2, 3)), jnp.float32)
        asked = Context(text, jnp.full(2, length), noise, both, None, None, 8)
        draft, state = in_turn(drafter, state, asked)
        read = part.init(text[:, :length], 32)
        for i in (1, 2):
            alone, _ = propose(part, read, dataclasses.replace(asked, noise=noise[:, :, i : i + 1]), 2)
            np.testing.assert_array_equal(draft.tokens[:, i::3], alone.tokens)
            np.testing.assert_allclose(draft.probs[:, i::3], alone.probs, atol=1e-5)
        assert (draft.tokens[:, 1::3] != draft.tokens[:, 2::3]).any()


@pytree
class Told(jspec.drafters.Stateless):
    """A drafter that remembers the arguments of `commit`."""

    token: jax.Array
    vocab_size = max_positions = None

    def propose(self, state, context, num_draft_tokens):
        tokens = jnp.tile(self.token + jnp.arange(num_draft_tokens), (context.lengths.size, 1))
        return Draft(tokens, jax.nn.one_hot(tokens, context.vocab_size)), state

    def commit(self, state, draft, verdict, hidden):
        return draft.tokens, verdict.num_accepted, verdict.next_token, hidden


def test_each_part_receives_verdict_on_its_own_chain():
    drafter = MultiDrafter([Told(jnp.int32(1)), Told(jnp.int32(4)), Told(jnp.int32(1))], 3)
    asked = Context(jnp.zeros((1, 4), jnp.int32), jnp.ones(1, int), jnp.zeros((1, 3, 3, 2, 3)), None, None, None, 8)
    draft, state = drafter.propose(((), (), ()), asked, 3)
    np.testing.assert_array_equal(draft.tokens[0], [1, 4, 1, 2, 5, 2, 3, 6, 3])
    verdict = Verdict(jnp.array([2]), jnp.array([7]), path=jnp.array([[3, 6, 0]]))  # the third chain's first two
    told = drafter.commit(state, draft, verdict, TargetSignals(jnp.arange(10)[None, :, None]))
    np.testing.assert_array_equal([one[0][0] for one in told], [[1, 2, 3], [4, 5, 6], [1, 2, 3]])
    assert [(int(one[1][0]), int(one[2][0])) for one in told] == [(2, 7), (0, 1), (2, 7)]
    np.testing.assert_array_equal([one[3][0, :, 0] for one in told], [[0, 1, 4, 7], [0, 2, 5, 8], [0, 3, 6, 9]])


@pytree
class ToldStates(Told):
    """A drafter like `Told` that also reads hidden states of the target."""

    features = (1,)

    def init(self, tokens, num_slots, features, lengths, target):
        return ()

    def commit(self, state, draft, verdict, hidden, features, target):
        return draft, verdict, hidden, features


def test_part_with_features_receives_any_accepted_path():
    drafter = MultiDrafter([ToldStates(jnp.int32(1)), Told(jnp.int32(4))], 3)
    asked = Context(jnp.zeros((1, 4), jnp.int32), jnp.ones(1, int), jnp.zeros((1, 3, 2, 2, 3)), None, None, None, 8)
    draft, state = drafter.propose(((), ()), asked, 3)
    verdict = Verdict(jnp.array([2]), jnp.array([7]), path=jnp.array([[2, 4, 0]]))  # the other chain's first two
    values = jnp.arange(7)[None, :, None]
    states = drafter.commit(state, draft, verdict, TargetSignals(values, values[..., None], target="the target"))
    path, told, hidden, features = states[0]
    np.testing.assert_array_equal(path.tokens[0], [4, 5, 7])
    np.testing.assert_array_equal(path.probs[0], [*np.eye(8)[[4, 5]], np.zeros(8)])
    assert (int(told.num_accepted[0]), int(told.next_token[0]), told.path) == (2, 7, None)
    for seen in (hidden[0, :3, 0], features[0, :3, 0, 0]):
        np.testing.assert_array_equal(seen, [0, 2, 4])


@pytree
class Starts(jspec.drafters.Stateless):
    """A drafter that drafts the next token ``text[L]`` and, after it, tokens that differ from `text`."""

    text: jax.Array
    vocab_size = max_positions = None

    def propose(self, state, context, num_draft_tokens):
        steps = jnp.arange(num_draft_tokens)
        tokens = (self.text[context.lengths[:, None] + steps] + (steps > 0)) % context.vocab_size
        return Draft(tokens, jax.nn.one_hot(tokens, context.vocab_size)), state


def test_coupled_follows_longest_of_equal_branches():
    batch = jnp.array([[1, 2, 3]]), jnp.array([3]), jax.random.split(jax.random.key(0), 1)
    plain = jspec.generate(MODEL, *batch, max_new_tokens=24)
    several = MultiDrafter([Starts(jnp.pad(jnp.append(batch[0], plain.tokens), (0, 8))), MODEL], 4)
    out = jspec.speculative_generate(MODEL, several, *batch, max_new_tokens=24, accept="coupled")
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.rounds == 5  # of five tokens each, as if the target drafted for itself


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (TypeError, r"tree is of type tuple; pass a jspec\.Tree", lambda: NGramDrafter(tree=(0, 0))),
        (ValueError, "tree has no draft tokens", lambda: NGramDrafter(tree=Tree(()))),
        (
            ValueError,
            "has 9 children, but the vocabulary has only 8 different tokens",
            lambda: NGramDrafter(tree=Tree.branching((9,))),
        ),
        (ValueError, "num_nodes must be an int of at least 1; got 0", lambda: TokenRecyclingDrafter(0)),
        (ValueError, "num_nodes must be an int of at least 1; got 2.5", lambda: TokenRecyclingDrafter(2.5)),
        (
            ValueError,
            r"drafts must be a sequence of at least two .*; got a sequence of length 1",
            lambda: MultiDrafter([MODEL]),
        ),
        (ValueError, r"drafts must be a sequence of at least two .*; got Llama", lambda: MultiDrafter(MODEL)),
        (ValueError, "num_draft_tokens must be an int of at least 1; got 0", lambda: MultiDrafter([MODEL, MODEL], 0)),
        (
            TypeError,
            r"drafts\[1\] is of type TokenRecyclingDrafter, which drafts a tree, but only chains can be combined",
            lambda: MultiDrafter([MODEL, TokenRecyclingDrafter()]),
        ),
        (
            TypeError,
            "draft is of type TokenRecyclingDrafter, which cannot branch",
            lambda: jspec.TreeDrafter(TokenRecyclingDrafter(), TREE),
        ),
        (
            ValueError,
            "MultiDrafter combines vocabularies of 8 and 9",
            lambda: MultiDrafter([jspec.UnigramDrafter.from_tokens([0, 1], size) for size in (8, 9)]),
        ),
    ],
)
def test_invalid_drafters_are_rejected(prompts, error, message, make):
    with pytest.raises(error, match=message):
        jspec.speculative_generate(MODEL, make(), *prompts([3], vocab_size=8), max_new_tokens=8)


def test_cascade_rejects_part_that_needs_top_tokens():
    curious = type("Curious", (Starts,), {"num_top_tokens": 2})(jnp.zeros(8))
    with pytest.raises(TypeError, match="is of type Curious, which needs values other than tokens"):
        jspec.CascadeDrafter(MODEL, curious)


def test_trees_without_replacement_are_rejected_by_k_seq(prompts):
    for drafter in (NGramDrafter(tree=TREE), TokenRecyclingDrafter(4), MultiDrafter([MODEL, MODEL])):
        with pytest.raises(
            ValueError, match=f'this {type(drafter).__name__} does not draw them independently; use accept="rej'
        ):
            jspec.speculative_generate(MODEL, drafter, *prompts([3], vocab_size=8), max_new_tokens=8, accept="k-seq")


def test_num_draft_tokens_conflicts_with_own_tree(prompts):
    for drafter in (NGramDrafter(tree=TREE), TokenRecyclingDrafter(4), MultiDrafter([MODEL, MODEL])):
        with pytest.raises(
            ValueError, match=f"num_draft_tokens=3 conflicts with a {type(drafter).__name__}, whose tree"
        ):
            jspec.speculative_generate(
                MODEL, drafter, *prompts([3], vocab_size=8), max_new_tokens=8, num_draft_tokens=3
            )
