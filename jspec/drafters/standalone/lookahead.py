"""Lookahead decoding: the target extends its own predictions while it verifies, and later drafts reuse them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.keys import positions_from
from jspec.core.tree import Tree
from jspec.core.types import Draft, Verdict, check_counts, pytree
from jspec.drafters.base import Context
from jspec.drafters.chunked_prefill import NoPrefill
from jspec.drafters.drafts import one_hot_draft
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.ngram import NGramDrafter, trie

# The number of n-grams that a row stores. With a window of 5, about 800 rounds add this many n-grams.
_POOL = 4096


@pytree
class _State:
    """Each row's memory of earlier rounds.

    Attributes:
        window: ``int32[B, N - 1, W]``, the target's predictions from the last N - 1 rounds. Each column is about one
            position further ahead than the previous column, and each row about one position after the previous row. All
            entries are -1 before the first round.
        pool: ``int32[B, M, N]``, the n-grams from these predictions, newest first; -1 in empty entries.
    """

    window: Array
    pool: Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["window", "ngram", "guesses"])
@dataclasses.dataclass(frozen=True)
class LookaheadDrafter(NoPrefill[_State]):
    """A drafter without a model: it drafts the target's own predictions for positions beyond the end of the sequence.

    In Fu et al. 2024, the verification pass also reads a window of tokens, N - 1 at each of the next W positions.
    These are not draft tokens. They are the tokens that the target itself predicted in the last N - 1 rounds, at all
    positions at once (Jacobi iteration, section 3.1). The target's predictions after these tokens become the window's
    newest tokens. Each column of the window is an n-gram and is added to a pool (section 3.2).

    The draft consists of the pool's n-grams that start with the sequence's last token, followed by the tokens that came
    after earlier occurrences of that token in the sequence. All of them depend only on data from before the round.
    Therefore they have one-hot distributions, and any tree rule except "k-seq" can verify them.

    Attributes:
        window: W, the number of positions to look ahead.
        ngram: N, the number of tokens in an n-gram, of which N - 1 are drafted at once.
        guesses: G, the number of n-grams that one pass verifies. The pass has ``(W + G) (N - 1)`` tokens.
    """

    window: int = 5
    ngram: int = 3
    guesses: int = 5
    vocab_size = None
    num_top_tokens = 1

    def __post_init__(self) -> None:
        check_counts(window=self.window, ngram=self.ngram, guesses=self.guesses)
        if self.ngram == 1:
            raise ValueError("ngram=1 leaves no token to draft after the first; use at least 2.")

    @property
    def tree(self) -> Tree:
        """The draft, then the window: a chain of its first row, with the rest of each column after its first token."""
        return _layout(self)[0]

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _State:
        """Return an empty window and an empty pool."""
        rows = max(self.window, min(_POOL, num_slots * self.window))
        window = jnp.full((len(tokens), self.ngram - 1, self.window), -1, jnp.int32)
        return _State(window, jnp.full((len(tokens), rows, self.ngram), -1, jnp.int32))

    def propose(self, state: _State, context: Context, num_draft_tokens: int) -> tuple[Draft, _State]:
        """Draft the continuations of the last token from the pool and the sequence, and add the window."""
        tree, nodes = _layout(self)
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens, found = self._guesses(state.pool, last, context)
        count = (self.ngram - 1) * self.window
        places = jnp.arange(count)[None] * context.lengths[:, None] // count  # evenly spaced; any tokens would do
        some = jnp.take_along_axis(context.tokens, places, axis=1).reshape(state.window.shape)
        window = jnp.where(state.window < 0, some, state.window)
        window = jnp.where(nodes[None] == 0, last[..., None], window)
        ahead = window.reshape(len(last), -1)[:, 1:]
        tokens = jnp.concatenate([tokens, ahead], axis=1)
        found = jnp.pad(found, ((0, 0), (0, nodes.size - 1)))
        return one_hot_draft(tokens, found, context, tree), dataclasses.replace(state, window=window)

    def _guesses(self, pool: Array, last: Array, context: Context) -> tuple[Array, Array]:
        """Return the tokens of the draft's branches, and whether each of them exists."""
        count = min(4 * self.guesses, pool.shape[1])  # some start with the same tokens
        same = pool[:, :, 0] == last
        order = lax.top_k(jnp.where(same, pool.shape[1] - jnp.arange(pool.shape[1])[None], 0), count)[1]
        pooled = jnp.take_along_axis(pool, order[..., None], axis=1)[..., 1:]
        copied, there = NGramDrafter().matches(context, count, self.ngram - 1)
        followed = jnp.concatenate([pooled, copied], axis=1)
        found = jnp.concatenate([jnp.take_along_axis(same, order, axis=1), there], axis=1)
        tokens, guessed = trie(_branches(self), followed, found)
        return jnp.where(guessed, tokens, 0), guessed

    def commit(self, state: _State, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _State:
        """Add the window's columns, with the predictions after them, to the pool, and advance the window.

        The window advances by as many tokens as the sequence does.
        """
        assert signals.top_tokens is not None, "the drafter has num_top_tokens"
        newest = signals.top_tokens[:, _layout(self)[1][-1], 0]
        columns = jnp.concatenate([state.window, newest[:, None]], axis=1)
        grams = jnp.swapaxes(columns, 1, 2)
        again = (state.pool[:, :, None] == grams[:, None]).all(-1).any(-1)  # keep these only once
        pool = jnp.concatenate([grams, jnp.where(again[..., None], -1, state.pool)], axis=1)
        further = positions_from(verdict.num_accepted, self.window) % self.window
        window = jnp.take_along_axis(columns[:, 1:], further[:, None], axis=2)
        return _State(window, pool[:, : state.pool.shape[1]])


def _branches(drafter: LookaheadDrafter) -> Tree:
    """Return the tree of the draft: G children of the last token, and a chain after each child."""
    return Tree.branching((drafter.guesses, *[1] * (drafter.ngram - 2)))


@functools.cache
def _layout(drafter: LookaheadDrafter) -> tuple[Tree, np.ndarray]:
    """Return the tree of a round, and the node of each window token, ``int[N - 1, W]``."""
    parents = list(_branches(drafter).parents)
    nodes = np.zeros((drafter.ngram - 1, drafter.window), int)
    for (row, column), _ in np.ndenumerate(nodes):
        if row or column:  # the first is the last committed token
            parents.append(int(nodes[row - 1, column] if row else nodes[0, column - 1]))
            nodes[row, column] = len(parents)
    return Tree(tuple(parents)), nodes
