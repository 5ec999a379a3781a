# pyright: strict, reportUnknownMemberType=false
"""The path of a round after its draft was verified: the accepted draft tokens and the token after them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.walk import above, along, end_of, is_guess, length_of_prefix
from jspec.core.types import Draft, Verdict


class Path(NamedTuple):
    """The path of a round: the accepted draft tokens and the token after them; in a tree, one branch.

    Attributes:
        tokens: ``int32[B, K + 1]``, the accepted tokens, the one after them, then anything. K is the draft's depth.
        target_probs: ``float32[B, K + 1, V]``, the target's distributions of these tokens.
        num_guessed: ``int32[B]``, how many of the tokens had a draft, including a rejected draft for the last one.
        guesses: ``int32[B, K + 1]``, how many draft tokens the draft has down to each depth.
    """

    tokens: Array
    target_probs: Array
    num_guessed: Array
    guesses: Array


def at_path(values: Array, verdict: Verdict) -> Array:
    """Return ``[B, K + 1, ...]``, the entries of ``values[B, N + 1, ...]`` at the tokens before those of the path."""
    return values if verdict.path is None else along(values, verdict.path)


def tokens_along(draft: Draft, verdict: Verdict) -> Array:
    """Return ``int32[B, K + 1]``: the accepted tokens, the token after them, then anything."""
    tokens = draft.tokens
    if verdict.path is not None:
        tokens = jnp.take_along_axis(tokens, jnp.maximum(verdict.path - 1, 0), axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1)))
    follows = jnp.arange(tokens.shape[1])[None] == verdict.num_accepted[:, None]
    return jnp.where(follows, verdict.next_token[:, None], tokens)


def along_path(draft: Draft, verdict: Verdict, target_probs: Array) -> Path:
    """Return the path of a verdict."""
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
    """Return ``bool[B, N]``: the nodes of a tree that hold a draft, as do all nodes before them on their branch."""
    return (is_guess(draft)[:, None, :] | ~above(draft.topology)).all(-1)
