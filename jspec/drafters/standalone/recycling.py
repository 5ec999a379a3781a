# pyright: strict, reportUnknownMemberType=false
"""Token recycling: what the target once thought likely behind a token is guessed when that token comes again."""

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

# How often the target's token was that of each rank, roughly: of 96 rounds of greedy answers of SmolLM2.
_ACCEPTANCE = (0.45, 0.13, 0.05, 0.03, 0.015, 0.01, 0.01, 0.005)
_MAX_DEPTH = 6
# Rows of the table that are kept: of 32 nodes those of 124 rounds.
_ROWS = 4096


@pytree
class _Table:
    """Which tokens the target thought likely behind which, what it said last first.

    Attributes:
        tokens: ``int32[B, M]``, -1 where the table is empty.
        followers: ``int32[B, M, R]``, the likeliest first, -1 where there are none.
    """

    tokens: Array
    followers: Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["num_nodes"])
@dataclasses.dataclass(frozen=True)
class TokenRecyclingDrafter(ReadsNothing):
    """Drafts a tree without a model: behind a token what the target last found likely there (Luo et al. 2024).

    Every pass of the target says, behind each node of the tree, kept or not, which eight tokens are likeliest. That is
    a row of an adjacency matrix of tokens, from which the next tree is read: a node's child of rank r has the token of
    rank r (sections 3.2 and 3.3). Here the matrix is a list of the rows that were written last, at most 4,096, which
    each request has for itself. It starts empty, and where it has no row the child is what last followed in the text.
    So all nodes depend on what came before the round alone: they have one-hot laws, under any rule for
    trees but "k-seq".

    Attributes:
        num_nodes: N, guesses that the target verifies in one pass.
    """

    num_nodes: int = 32
    vocab_size = None
    max_positions = None
    num_likeliest = len(_ACCEPTANCE)

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes)

    @property
    def tree(self) -> Tree:
        """That which brings most for the acceptance of ranks that was measured."""
        return _best(int(self.num_nodes))

    def init(self, tokens: Array, num_slots: int) -> tuple[_Table, Array]:
        """An empty table, and ``int32[B]``, the token at node 0 of the last tree."""
        nodes = self.tree.size + 1
        rows = len(tokens), max(nodes, min(_ROWS, num_slots * nodes))
        empty = _Table(jnp.full(rows, -1, jnp.int32), jnp.full((*rows, self.num_likeliest), -1, jnp.int32))
        return empty, jnp.zeros(len(tokens), jnp.int32)

    def propose(
        self, state: tuple[_Table, Array], context: Context, num_draft_tokens: int
    ) -> tuple[Draft, tuple[_Table, Array]]:
        """Level by level: what the table has behind every node."""
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
        """The rows of all nodes come before those of earlier rounds; of equal tokens the first node's counts."""
        table, last = state
        tokens = jnp.concatenate([last[:, None], jnp.where(is_guess(draft), draft.tokens, -1)], axis=1)
        missing = self.num_likeliest - likeliest.shape[-1]  # of a small vocabulary
        new = _Table(tokens, jnp.pad(likeliest, ((0, 0), (0, 0), (0, missing)), constant_values=-1))
        kept = table.tokens.shape[1]

        def before(new: Array, old: Array) -> Array:
            return jnp.concatenate([new, old], axis=1)[:, :kept]

        return jax.tree.map(before, new, table), last


@functools.cache
def _best(num_nodes: int) -> Tree:
    return best_tree(_ACCEPTANCE, num_nodes, _MAX_DEPTH)


def _followers(table: _Table, tokens: Array, context: Context) -> Array:
    """What comes behind ``tokens[B, S]``, ``int32[B, S, R]``: as the table says, else as the text last went on."""
    same = tokens[..., None] == table.tokens[:, None]
    row = jnp.take_along_axis(table.followers, jnp.argmax(same, axis=-1)[..., None], axis=1)
    places = jnp.arange(context.tokens.shape[1])[None, None]
    earlier = (tokens[..., None] == context.tokens[:, None]) & (places < context.lengths[:, None, None] - 1)
    place = jnp.where(earlier, places, -1).max(-1)
    copied = jnp.where(place >= 0, jnp.take_along_axis(context.tokens, place + 1, axis=1), -1)
    known, first = same.any(-1, keepdims=True), jnp.arange(row.shape[-1])[None, None] == 0
    return jnp.where(known, row, jnp.where(first, copied[..., None], -1))
