"""Lookahead decoding against an implementation with lists, round by round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import LookaheadDrafter
from jspec.core.types import Verdict
from jspec.drafters.signals import TargetSignals
from support import toys
from support.own_trees import context, matches, propose

pytestmark = pytest.mark.usefixtures("quick_compile")


def guesses(said, pool, count, ngram):
    """Return continuations of the last token, from the pool and then from the text; keep one for each first token."""
    found = [gram[1:] for gram in pool if gram[0] == said[-1]][: 4 * count]
    for end in matches(said, 3, 1)[: 4 * count]:
        text = list(said)
        for i in range(ngram - 1):
            text.append(text[end + 1 + i])
        found.append(tuple(text[len(said) :]))
    firsts = {}
    for gram in found:
        firsts.setdefault(gram[0], gram)
    return list(firsts.values())[:count]


@pytest.mark.parametrize(("window", "ngram", "count"), [(5, 3, 2), (3, 4, 3), (4, 2, 3), (1, 3, 1)])
def test_candidates_come_from_target_predictions_in_window(window, ngram, count):
    """The target's most likely tokens and the text of both rows are random."""
    rng, drafter, rows, vocab_size = np.random.default_rng(0), LookaheadDrafter(window, ngram, count), 2, 5
    tree, state = drafter.tree, drafter.init(jnp.zeros((rows, 3), jnp.int32), 80)
    text, lengths = rng.integers(vocab_size, size=(rows, 80)).astype(np.int32), np.array([1, 6])
    first, branches = count * (ngram - 1), [path[path > 0] - 1 for path in tree.paths[1:]]
    windows, pools, seen, commit = [None] * rows, [[] for _ in range(rows)], 0, jax.jit(drafter.commit)
    for _ in range(12):
        draft, state = propose(drafter, state, context(text, lengths, vocab_size), tree.max_depth)
        probs, tokens = np.array(draft.probs), np.array(draft.tokens)
        assert not probs[:, first:].any()  # the window is read but not verified
        accepted, top_tokens = rng.integers(0, ngram, rows), rng.integers(vocab_size, size=(rows, tree.size + 1, 1))
        for b in range(rows):
            said = text[b, : lengths[b]].tolist()
            expected = guesses(said, pools[b], count, ngram)
            whole = [branch for branch in branches[:first] if probs[b, branch].sum() == len(branch) == ngram - 1]
            assert sorted(tuple(tokens[b, branch].tolist()) for branch in whole) == sorted(expected)
            assert probs[b].sum() == (ngram - 1) * len(expected)
            seen += len(expected)
            held = np.append(said[-1], tokens[b, first:]).reshape(ngram - 1, window)
            if windows[b] is not None:
                np.testing.assert_array_equal(held.flat[1:], windows[b].flat[1:])
            assert set(held.flat) <= set(said) | set(range(vocab_size) if windows[b] is not None else ())
            newest = np.append(0, np.arange(first + 1, tree.size + 1)).reshape(held.shape)[-1]
            columns = np.vstack([held, top_tokens[b, newest, 0]])
            new = [tuple(column) for column in columns.T.tolist()]
            pools[b] = [*new, *(gram for gram in pools[b] if gram not in new)]
            windows[b] = np.roll(columns[1:], -accepted[b], axis=1)
        verdict = Verdict(jnp.asarray(accepted, jnp.int32), jnp.zeros(rows, jnp.int32))
        state = commit(state, draft, verdict, TargetSignals(None, top_tokens=jnp.asarray(top_tokens, jnp.int32)))
        lengths = lengths + accepted + 1
    assert seen > 15


def test_window_is_a_chain_followed_by_columns():
    """Nodes 1 to 6 are two candidates of three tokens each."""
    assert LookaheadDrafter(window=3, ngram=4, guesses=2).tree.parents[6:] == (0, 7, 0, 7, 8, 9, 10, 11)


def test_lookahead_speeds_up_repetitive_target(prompts):
    model, _ = toys.markov_pair(0)
    batch = prompts([4, 2], vocab_size=8)
    options = {"max_new_tokens": 48, "sampling": jspec.SamplingParams(temperature=0.0)}
    plain = jspec.generate(model, *batch, **options)
    out = jspec.speculative_generate(model, LookaheadDrafter(guesses=2), *batch, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (out.stats.rounds < 32).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be an int of at least 1; got 0"),
        ({"ngram": 1}, "ngram=1 leaves no token to draft"),
        ({"guesses": 2.5}, "guesses must be an int of at least 1; got 2.5"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        LookaheadDrafter(**options)
