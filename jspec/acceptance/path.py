# pyright: strict, reportUnknownMemberType=false
"""What a round goes along once its draft has been judged: the accepted guesses and the token behind them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.walk import above, along, end_of, is_guess, length_of_prefix
from jspec.core.types import Draft, Verdict


class Path(NamedTuple):
    """What a round goes along: the accepted guesses and the token behind them; of a tree one branch of it.

    Attributes:
        tokens: ``int32[B, K + 1]``, the accepted ones, that behind them, then anything. K is the draft's depth.
        target_probs: ``float32[B, K + 1, V]``, the target's laws of those.
        num_guessed: ``int32[B]``, how many of the tokens were guessed, a refused guess for the last one included.
        guesses: ``int32[B, K + 1]``, how many guesses the draft has down to each depth.
    """

    tokens: Array
    target_probs: Array
    num_guessed: Array
    guesses: Array


def at_path(values: Array, verdict: Verdict) -> Array:
    """``[B, K + 1, ...]``, what ``values[B, N + 1, ...]`` has at the tokens before those of the path."""
    return values if verdict.path is None else along(values, verdict.path)


def tokens_along(draft: Draft, verdict: Verdict) -> Array:
    """``int32[B, K + 1]``: the accepted tokens, that behind them, then anything."""
    tokens = draft.tokens
    if verdict.path is not None:
        tokens = jnp.take_along_axis(tokens, jnp.maximum(verdict.path - 1, 0), axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 1)))
    follows = jnp.arange(tokens.shape[1])[None] == verdict.num_accepted[:, None]
    return jnp.where(follows, verdict.next_token[:, None], tokens)


def along_path(draft: Draft, verdict: Verdict, target_probs: Array) -> Path:
    """The path that a verdict has found."""
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
    """How many tokens of a chain come before one that is no guess, ``int32[B]``."""
    return length_of_prefix(is_guess(draft))


def whole_branches(draft: Draft) -> Array:
    """``bool[B, N]``: the nodes of a tree that are guesses, and so is all before them."""
    return (is_guess(draft)[:, None, :] | ~above(draft.topology)).all(-1)
