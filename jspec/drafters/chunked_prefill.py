# pyright: strict, reportUnknownMemberType=false
"""Prefill in pieces, for drafters that start to read a sequence while other requests are decoding.

`init` prefills whole prompts. An engine prefills a long prompt piece by piece so that other requests need not wait, and
lets the draft prefill later than the target. A drafter that supports this has a `read` method. A drafter that stores
nothing about a sequence does not need one.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Stateless
from jspec.drafters.capabilities import features_of


class NoPrefill:
    """The `read` method of a drafter that stores nothing about a sequence."""

    def read(self, state: Any, tokens: Array, start: Array, count: Array) -> Any:
        return state


def leaves_of(drafter: Any) -> Iterator[Any]:
    """Yield the drafters that `drafter` is composed of, or `drafter` itself."""
    parts = getattr(drafter, "parts", None)
    if parts is None:
        yield drafter
    else:
        for part in parts:
            yield from leaves_of(part)


def keeps_nothing(drafter: Any) -> bool:
    """Return whether no part of `drafter` stores anything about a sequence."""
    return all(isinstance(leaf, NoPrefill) or _init_of(leaf) is Stateless.init for leaf in leaves_of(drafter))


def can_read(drafter: Any) -> bool:
    """Return whether `drafter` can prefill a sequence in pieces."""
    return all(hasattr(leaf, "read") or _init_of(leaf) is Stateless.init for leaf in leaves_of(drafter))


def _init_of(drafter: object) -> Any:
    return getattr(type(drafter), "init", None)


def begin(drafter: Any, target: Any, batch: int, num_slots: int) -> Any:
    """Return the state of a drafter that has read nothing yet, for `batch` rows."""
    tokens = jnp.zeros((batch, 1 if can_read(drafter) else num_slots), jnp.int32)
    if not features_of(drafter):
        return drafter.init(tokens, num_slots)
    features = jnp.zeros((batch, 1, len(features_of(drafter)), target.config.hidden_size), target.dtype)
    lengths = jnp.ones(batch, jnp.int32)
    return drafter.init(tokens, num_slots, features=features, lengths=lengths, target=target)


def prefill_chunk(drafter: Any, state: Any, tokens: Array, start: Array, count: Array, **target_signals: Any) -> Any:
    """Return the state of `drafter` after the next ``count[b]`` tokens of each row.

    Args:
        drafter: a drafter for which `can_read` is True.
        tokens: ``int32[B, C + 1]``, from position ``start[b]`` on: the tokens to read and the one after them, followed
            by arbitrary values.
        start: ``int32[B]``; all positions before it have been read.
        count: ``int32[B]`` in 0 .. C; 0 leaves a row unchanged, except for slots after its last token.
        target_signals: ``features [B, C, F, E]`` of these tokens and the ``target``, for a drafter that reads features.
    """
    return drafter.read(state, tokens, start, count, **target_signals) if hasattr(drafter, "read") else state


def where_read(count: Array, new: Any, old: Any) -> Any:
    """Select the pytree `new` in rows that have read at least one token, and `old` in the other rows."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where((count > 0).reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
