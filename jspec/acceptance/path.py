"""A round's path after verification: the accepted draft tokens and the token after them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.walk import above, along, end_of, is_guess, length_of_prefix
from jspec.core.types import Draft, Verdict


class Path(NamedTuple):
    """A round's path: the accepted draft tokens (in a tree, all on one branch) and the token after them.

    Attributes:
        tokens: ``int32[B, K + 1]``: the accepted tokens, the token after them, and arbitrary values. K is the draft's
            depth.
        target_probs: ``float32[B, K + 1, V]``, the target's distributions at these tokens.
        num_guessed: ``int32[B]``, the number of path positions that had a draft token, including a rejected one at the
            last position.
        guesses: ``int32[B, K + 1]``, the number of draft tokens up to each depth.
    """

    tokens: Array
    target_probs: Array
    num_guessed: Array
    guesses: Array


def at_path(values: Array, verdict: Verdict) -> Array:
    """Return ``[B, K + 1, ...]``, the entries of ``values[B, N + 1, ...]`` at the token before each path token."""
    return values if verdict.path is None else along(values, verdict.path)


def tokens_along(draft: Draft, verdict: Verdict) -> Array:
    """Return ``int32[B, K + 1]``: the accepted tokens, the token after them, and arbitrary values."""
    tokens = draft.tokens
    if verdict.path is not None:
        tokens = jnp.take_along_axis(tokens, jnp.maximum(verdict.path - 1, 0), axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1)))
    follows = jnp.arange(tokens.shape[1])[None] == verdict.num_accepted[:, None]
    return jnp.where(follows, verdict.next_token[:, None], tokens)


def along_path(draft: Draft, verdict: Verdict, target_probs: Array) -> Path:
    """Return the path that a verdict selects."""
    tree = draft.topology
    if verdict.path is None:
        guessed = num_guessed(draft)
        guesses = jnp.minimum(guessed[:, None], jnp.arange(tree.size + 1, dtype=jnp.int32)[None])
    else:
        path, guess = verdict.path, whole_branches(draft)
        target_probs = at_path(target_probs, verdict)
        end = end_of(verdict.num_accepted, path)
        follows = guess & (jnp.atleast_2d(jnp.asarray(tree.parents)) == end[:, None])
        guessed = verdict.num_accepted + follows.any(1).astype(jnp.int32)
        depths = jnp.atleast_2d(jnp.asarray(tree.offsets))[:, None, 1:]
        down_to = depths <= jnp.arange(tree.max_depth + 1)[None, :, None]
        guesses = (guess[:, None, :] & down_to).sum(-1, dtype=jnp.int32)
    return Path(tokens_along(draft, verdict), target_probs, guessed, guesses)


def num_guessed(draft: Draft) -> Array:
    """Return ``int32[B]``, the number of draft tokens in a chain before its first empty position."""
    return length_of_prefix(is_guess(draft))


def whole_branches(draft: Draft) -> Array:
    """Return ``bool[B, N]``: whether each node and all its ancestors hold a draft token."""
    return (is_guess(draft)[:, None, :] | ~above(draft.topology)).all(-1)
