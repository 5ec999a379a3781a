"""Token recycling: when a token recurs, draft the tokens that the target ranked highest after its last occurrence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jspec.acceptance.walk import is_guess
from jspec.core.tree import Tree
from jspec.core.types import Draft, Verdict, check_count, pytree
from jspec.drafters.base import Context
from jspec.drafters.chunked_prefill import NoPrefill
from jspec.drafters.drafts import one_hot_draft
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.theory.tree_yield import best_tree

# The approximate frequency of each rank of the target's token, in 96 rounds of SmolLM2's greedy answers.
_ACCEPTANCE = (0.45, 0.13, 0.05, 0.03, 0.015, 0.01, 0.01, 0.005)
_MAX_DEPTH = 6
# The number of table rows to keep. Drafts of 32 nodes write about this many rows in 124 rounds.
_ROWS = 4096


@pytree
class _Table:
    """The tokens that the target ranked as most likely after each token, with the newest rows first.

    Attributes:
        tokens: ``int32[B, M]``, -1 in empty rows.
        followers: ``int32[B, M, R]``, the most likely token first; -1 in empty entries.
    """

    tokens: Array
    followers: Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_nodes"])
@dataclasses.dataclass(frozen=True)
class TokenRecyclingDrafter(NoPrefill[tuple[_Table, Array]]):
    """A tree drafter without a model: after a token it drafts the tokens that the target last ranked highest there.

    In Luo et al. 2024, every pass of the target returns the eight most likely tokens after each node of the tree,
    whether the node is accepted or not. Each node's eight tokens form one row of a token adjacency matrix. The next
    tree is read from the matrix: a node's child of rank r has the token of rank r (sections 3.2 and 3.3).

    Here the matrix is a list of the most recently written rows, at most 4,096 per request. The list starts empty. If it
    has no row for a token, the child is the token that last followed that token in the sequence. Therefore all nodes
    depend only on data from before the round. They have one-hot distributions, and any tree rule except "k-seq" can
    verify them.

    Attributes:
        num_nodes: N, the number of draft tokens that the target verifies in one pass.
    """

    num_nodes: int = 32
    vocab_size = None
    num_top_tokens = len(_ACCEPTANCE)

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes)

    @property
    def tree(self) -> Tree:
        """The tree with the highest yield at the measured acceptance rate of each rank."""
        return _best(int(self.num_nodes))

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> tuple[_Table, Array]:
        """Return an empty table, and the token at node 0 of the last tree, ``int32[B]``."""
        nodes = self.tree.size + 1
        rows = len(tokens), max(nodes, min(_ROWS, num_slots * nodes))
        empty = _Table(jnp.full(rows, -1, jnp.int32), jnp.full((*rows, self.num_top_tokens), -1, jnp.int32))
        return empty, jnp.zeros(len(tokens), jnp.int32)

    def propose(
        self, state: tuple[_Table, Array], context: Context, num_draft_tokens: int
    ) -> tuple[Draft, tuple[_Table, Array]]:
        """Draft level by level, looking up the tokens after each node in the table."""
        tree, table = self.tree, state[0]
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        token, guess = last, jnp.ones(last.shape, bool)
        tokens: list[Array] = []
        guessed: list[Array] = []
        for depth in range(1, tree.max_depth + 1):
            parents, ranks = tree.level(depth).parents, tree.sibling_ranks[tree.offsets == depth]
            token = _followers(table, token, context)[:, parents, ranks]
            guess = guess[:, parents] & (token >= 0)
            tokens, guessed = [*tokens, token], [*guessed, guess]
        there = jnp.concatenate(guessed, axis=1)
        return one_hot_draft(jnp.where(there, jnp.concatenate(tokens, axis=1), 0), there, context, tree), (
            table,
            last[:, 0],
        )

    def commit(
        self, state: tuple[_Table, Array], draft: Draft, verdict: Verdict, signals: TargetSignals
    ) -> tuple[_Table, Array]:
        """Insert the rows of all nodes before earlier rounds' rows.

        If several nodes have the same token, the first node's row is used.
        """
        top_tokens = signals.top_tokens
        assert top_tokens is not None, "the drafter has num_top_tokens"
        table, last = state
        tokens = jnp.concatenate([last[:, None], jnp.where(is_guess(draft), draft.tokens, -1)], axis=1)
        missing = self.num_top_tokens - top_tokens.shape[-1]  # if the vocabulary is small
        new = _Table(tokens, jnp.pad(top_tokens, ((0, 0), (0, 0), (0, missing)), constant_values=-1))
        kept = table.tokens.shape[1]

        def before(new: Array, old: Array) -> Array:
            return jnp.concatenate([new, old], axis=1)[:, :kept]

        return jax.tree.map(before, new, table), last


@functools.cache
def _best(num_nodes: int) -> Tree:
    return best_tree(_ACCEPTANCE, num_nodes, _MAX_DEPTH)


def _followers(table: _Table, tokens: Array, context: Context) -> Array:
    """Return the tokens after ``tokens[B, S]``, ``int32[B, S, R]``, from the table or otherwise from the sequence.

    The sequence supplies only one token: the one that followed the most recent occurrence.
    """
    same = tokens[..., None] == table.tokens[:, None]
    row = jnp.take_along_axis(table.followers, jnp.argmax(same, axis=-1)[..., None], axis=1)
    places = jnp.arange(context.tokens.shape[1])[None, None]
    earlier = (tokens[..., None] == context.tokens[:, None]) & (places < context.lengths[:, None, None] - 1)
    place = jnp.where(earlier, places, -1).max(-1)
    copied = jnp.where(place >= 0, jnp.take_along_axis(context.tokens, place + 1, axis=1), -1)
    known, first = same.any(-1, keepdims=True), jnp.arange(row.shape[-1])[None, None] == 0
    return jnp.where(known, row, jnp.where(first, copied[..., None], -1))
