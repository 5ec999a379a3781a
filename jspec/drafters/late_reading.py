# pyright: strict, reportUnknownMemberType=false
"""Texts that are read in pieces, and drafters that begin to read when others have long begun to write.

`init` reads whole prompts. An engine reads a long one piece by piece, so that others need not wait, and lets the draft
read later than the target. A drafter that can has `read`; one that keeps nothing of a text need not.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jspec.drafters.base import Stateless
from jspec.drafters.capabilities import features_of


class ReadsNothing:
    """A drafter that remembers nothing of a text: its `read`."""

    def read(self, state: Any, tokens: Array, start: Array, count: Array) -> Any:
        return state


def leaves_of(drafter: Any) -> Iterator[Any]:
    """The drafters that `drafter` is made of, or itself."""
    parts = getattr(drafter, "parts", None)
    if parts is None:
        yield drafter
    else:
        for part in parts:
            yield from leaves_of(part)


def keeps_nothing(drafter: Any) -> bool:
    """Whether none of its parts remembers anything of a text."""
    return all(isinstance(leaf, ReadsNothing) or _init_of(leaf) is Stateless.init for leaf in leaves_of(drafter))


def can_read(drafter: Any) -> bool:
    """Whether it can be given a text in pieces."""
    return all(hasattr(leaf, "read") or _init_of(leaf) is Stateless.init for leaf in leaves_of(drafter))


def _init_of(drafter: object) -> Any:
    return getattr(type(drafter), "init", None)


def begin(drafter: Any, target: Any, batch: int, num_slots: int) -> Any:
    """The state of a drafter that has read nothing yet, of `batch` rows."""
    tokens = jnp.zeros((batch, 1 if can_read(drafter) else num_slots), jnp.int32)
    if not features_of(drafter):
        return drafter.init(tokens, num_slots)
    features = jnp.zeros((batch, 1, len(features_of(drafter)), target.config.hidden_size), target.dtype)
    lengths = jnp.ones(batch, jnp.int32)
    return drafter.init(tokens, num_slots, features=features, lengths=lengths, target=target)


def read_on(drafter: Any, state: Any, tokens: Array, start: Array, count: Array, **told: Any) -> Any:
    """The state of `drafter` after the next ``count[b]`` tokens of each row.

    Args:
        drafter: one that `can_read`.
        tokens: ``int32[B, C + 1]``, from position ``start[b]`` on: those and the one behind them, then anything.
        start: ``int32[B]``; all before has been read.
        count: ``int32[B]`` in 0 .. C; 0 leaves a row as it is, but for slots behind its text.
        told: ``features [B, C, F, E]`` of these tokens and the ``target``, to one that reads them.
    """
    return drafter.read(state, tokens, start, count, **told) if hasattr(drafter, "read") else state


def where_read(count: Array, new: Any, old: Any) -> Any:
    """`new`, a pytree, in rows that have read something, else `old`."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where((count > 0).reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
