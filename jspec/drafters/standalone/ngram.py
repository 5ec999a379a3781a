"""Prompt lookup: copy the tokens after an earlier match in the row (Leviathan et al. 2023, section 3.6, "copy")."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.tree import Tree
from jspec.core.types import Draft, check_counts
from jspec.drafters.base import Context, Stateless, as_tree
from jspec.drafters.drafts import one_hot_draft


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["max_ngram", "min_ngram", "tree"])
@dataclasses.dataclass(frozen=True)
class NGramDrafter(Stateless[tuple[()]]):
    """A drafter that finds the longest earlier match of the row's last tokens and copies the tokens after it.

    If several matches are equally long, the most recent one is used. The copy may continue with its own tokens, so
    periodic text is repeated indefinitely. A row without a match proposes nothing. A copied token has a one-hot
    distribution, so it is accepted with probability p(x).

    With a `tree`, the draft is a trie of the tokens after several matches. A node's children are the distinct next
    tokens of the matches that agree with its branch. They are ordered by match: the longest first, then the most
    recent. A node depends only on the sequence so far, so it also has a one-hot distribution, and any tree rule except
    "k-seq" can verify it.

    Attributes:
        max_ngram: the largest number of tokens to compare.
        min_ngram: the smallest number of tokens that must match.
        tree: a `jspec.Tree`, whose nodes are renumbered by depth, or None for a chain. If there are too few distinct
            continuations, some nodes are not drafted.
    """

    max_ngram: int = 3
    min_ngram: int = 1
    tree: Tree | None = None
    vocab_size = None

    def __post_init__(self) -> None:
        check_counts(max_ngram=self.max_ngram, min_ngram=self.min_ngram)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram={self.min_ngram} is more than max_ngram={self.max_ngram}; swap them.")
        if self.tree is not None:
            object.__setattr__(self, "tree", as_tree(self.tree))

    def propose(self, state: tuple[()], context: Context, num_draft_tokens: int) -> tuple[Draft, tuple[()]]:
        """Draft the tokens after the match with one-hot distributions, or zeros in a row without a match."""
        if self.tree is None:
            followed, found = self.matches(context, 1, num_draft_tokens)
            return one_hot_draft(followed[:, 0], found, context), state
        # Some matches continue with the same tokens, so compare more matches than the tree has branches.
        followed, found = self.matches(context, 4 * self.tree.max_width, num_draft_tokens)
        return one_hot_draft(*trie(self.tree, followed, found), context, self.tree), state

    def matches(self, context: Context, count: int, num_draft_tokens: int) -> tuple[Array, Array]:
        """Return the tokens after the best matches, ``int32[B, M, K]``, and whether each match exists, ``bool[B, M]``.

        M is at most `count`.
        """
        count = min(count, context.tokens.shape[1])
        copy = functools.partial(self._copy, count=count, num_draft_tokens=num_draft_tokens)
        return jax.vmap(copy)(context.tokens, context.lengths)

    def _copy(self, tokens: Array, length: Array, count: int, num_draft_tokens: int) -> tuple[Array, Array]:
        """Return the tokens after one row's best matches, ``int32[count, K]``, and whether each match exists."""
        ends = jnp.arange(tokens.size)
        same, matched = (ends < length - 1), jnp.zeros(tokens.size, jnp.int32)
        for back in range(self.max_ngram):
            same &= (jnp.roll(tokens, back) == tokens[length - 1 - back]) & (ends >= back)
            matched += same.astype(jnp.int32)
        matched = jnp.where(matched >= self.min_ngram, matched, 0)
        scores = matched * tokens.size + ends  # the longest match, and the latest of equally long ones
        best = jnp.argmax(scores)[None] if count == 1 else lax.top_k(scores, count)[1]
        period = jnp.maximum(length - 1 - best, 1)[:, None]
        source = best[:, None] + 1 + jnp.arange(num_draft_tokens)[None] % period
        return tokens[source].astype(jnp.int32), matched[best] > 0


def trie(tree: Tree, followed: Array, found: Array) -> tuple[Array, Array]:
    """Return the tokens at the nodes of `tree`, ``int32[B, N]``, and whether each node is drafted.

    Args:
        tree: a tree whose nodes are numbered by depth.
        followed: ``int32[B, M, max_depth]``, the tokens after each match.
        found: ``bool[B, M]``, whether each match exists.
    """
    tokens: list[Array] = []
    guessed: list[Array] = []
    agree = found[:, None]  # whether each match agrees with each node of a level, [B, S, M]
    for depth in range(tree.max_depth):
        following, left = followed[:, None, :, depth], agree
        children: list[tuple[Array, Array, Array]] = []
        nodes = np.flatnonzero(tree.offsets == depth + 1)
        for _ in range(tree.sibling_ranks[nodes].max() + 1):
            first = jnp.argmax(left, axis=-1, keepdims=True)
            token = jnp.take_along_axis(jnp.broadcast_to(following, left.shape), first, axis=-1)
            children.append((token[..., 0], left.any(-1), left & (following == token)))
            left &= following != token
        place = tree.level(depth + 1).parents, tree.sibling_ranks[nodes]
        token, guess, agree = (jnp.stack(parts, axis=2)[:, *place] for parts in zip(*children, strict=True))
        tokens, guessed = [*tokens, token], [*guessed, guess]
    return jnp.concatenate(tokens, axis=1), jnp.concatenate(guessed, axis=1)
