# pyright: strict, reportUnknownMemberType=false
"""Token recycling: when a token comes again, draft the tokens that the target once found likely after it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from jspec.acceptance.walk import is_guess
from jspec.core.tree import Tree
from jspec.core.types import Draft, Verdict, check_count, pytree
from jspec.drafters.base import Context, certain
from jspec.drafters.late_reading import ReadsNothing
from jspec.theory.tree_yield import best_tree

# The rough frequency with which the target's token had each rank, in 96 rounds of greedy answers of SmolLM2.
_ACCEPTANCE = (0.45, 0.13, 0.05, 0.03, 0.015, 0.01, 0.01, 0.005)
_MAX_DEPTH = 6
# The number of table rows to keep: those of 124 rounds with 32 nodes.
_ROWS = 4096


@pytree
class _Table:
    """The tokens that the target found likely after each token, the newest rows first.

    Attributes:
        tokens: ``int32[B, M]``, -1 where the table is empty.
        followers: ``int32[B, M, R]``, the likeliest first, -1 where there are none.
    """

    tokens: Array
    followers: Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_nodes"])
@dataclasses.dataclass(frozen=True)
class TokenRecyclingDrafter(ReadsNothing):
    """A drafter of trees without a model: after a token it drafts what the target last found likely there.

    Luo et al. 2024: every pass of the target gives the eight likeliest tokens after each node of the tree, accepted or
    not. They are a row of an adjacency matrix of tokens. The next tree is read from the matrix: a node's child of rank
    r has the token of rank r (sections 3.2 and 3.3).

    Here the matrix is a list of the rows that were written last, at most 4,096 for each request. The list starts empty.
    If it has no row for a token, the child is what last followed that token in the text. So all nodes depend only on
    what came before the round. They have one-hot distributions, under any rule for trees but "k-seq".

    Attributes:
        num_nodes: N, the number of draft tokens that the target verifies in one pass.
    """

    num_nodes: int = 32
    vocab_size = None
    max_positions = None
    num_likeliest = len(_ACCEPTANCE)

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes)

    @property
    def tree(self) -> Tree:
        """The tree that yields most for the measured acceptance of ranks."""
        return _best(int(self.num_nodes))

    def init(self, tokens: Array, num_slots: int) -> tuple[_Table, Array]:
        """Return an empty table, and ``int32[B]``, the token at node 0 of the last tree."""
        nodes = self.tree.size + 1
        rows = len(tokens), max(nodes, min(_ROWS, num_slots * nodes))
        empty = _Table(jnp.full(rows, -1, jnp.int32), jnp.full((*rows, self.num_likeliest), -1, jnp.int32))
        return empty, jnp.zeros(len(tokens), jnp.int32)

    def propose(
        self, state: tuple[_Table, Array], context: Context, num_draft_tokens: int
    ) -> tuple[Draft, tuple[_Table, Array]]:
        """Draft level by level what the table has after every node."""
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
        return certain(jnp.where(there, jnp.concatenate(tokens, axis=1), 0), there, context, tree), (table, last[:, 0])

    def commit(
        self, state: tuple[_Table, Array], draft: Draft, verdict: Verdict, hidden: Array, *, likeliest: Array
    ) -> tuple[_Table, Array]:
        """Put the rows of all nodes before those of earlier rounds; the first node of equal tokens counts."""
        table, last = state
        tokens = jnp.concatenate([last[:, None], jnp.where(is_guess(draft), draft.tokens, -1)], axis=1)
        missing = self.num_likeliest - likeliest.shape[-1]  # if the vocabulary is small
        new = _Table(tokens, jnp.pad(likeliest, ((0, 0), (0, 0), (0, missing)), constant_values=-1))
        kept = table.tokens.shape[1]

        def before(new: Array, old: Array) -> Array:
            return jnp.concatenate([new, old], axis=1)[:, :kept]

        return jax.tree.map(before, new, table), last


@functools.cache
def _best(num_nodes: int) -> Tree:
    return best_tree(_ACCEPTANCE, num_nodes, _MAX_DEPTH)


def _followers(table: _Table, tokens: Array, context: Context) -> Array:
    """Return the tokens after ``tokens[B, S]``, ``int32[B, S, R]``: from the table, or else from the text.

    The text gives the one token that last followed.
    """
    same = tokens[..., None] == table.tokens[:, None]
    row = jnp.take_along_axis(table.followers, jnp.argmax(same, axis=-1)[..., None], axis=1)
    places = jnp.arange(context.tokens.shape[1])[None, None]
    earlier = (tokens[..., None] == context.tokens[:, None]) & (places < context.lengths[:, None, None] - 1)
    place = jnp.where(earlier, places, -1).max(-1)
    copied = jnp.where(place >= 0, jnp.take_along_axis(context.tokens, place + 1, axis=1), -1)
    known, first = same.any(-1, keepdims=True), jnp.arange(row.shape[-1])[None, None] == 0
    return jnp.where(known, row, jnp.where(first, copied[..., None], -1))
