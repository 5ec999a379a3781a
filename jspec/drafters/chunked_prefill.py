"""Chunked prefill, for drafters that start to read a sequence while other requests are decoding.

`init` prefills whole prompts. An engine prefills a long prompt piece by piece, so that other requests need not wait,
and prefills the drafter later than the target. A drafter that supports this has a `read` method. A drafter that stores
nothing about a sequence does not need this method.
"""

from collections.abc import Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.types import PyTree
from jspec.drafters.base import Drafter, State, declared
from jspec.drafters.capabilities import features_of
from jspec.drafters.declared import default
from jspec.drafters.duck_typed import adapted
from jspec.drafters.signals import NO_SIGNALS, PromptSignals
from jspec.models.llama import Llama

Tree = TypeVar("Tree")


class NoPrefill(Drafter[State]):
    """A base class, with `read`, for drafters that store nothing about a sequence."""

    @default
    def needs_prefill(self) -> bool:
        return False

    def read(self, state: State, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> State:
        return state


def leaves_of(drafter: Drafter[PyTree]) -> Iterator[Drafter[PyTree]]:
    """Yield the innermost drafters that `drafter` combines, or `drafter` itself if it has no parts."""
    parts = declared(drafter).parts
    if not parts:
        yield drafter
    for part in parts:
        yield from leaves_of(adapted(part))


def needs_prefill(drafter: Drafter[PyTree]) -> bool:
    """Return whether any part of `drafter` stores something about a sequence during prefill."""
    return any(leaf.needs_prefill for leaf in leaves_of(drafter))


def can_read(drafter: Drafter[PyTree]) -> bool:
    """Return whether `drafter` can prefill a sequence in pieces."""
    return all(leaf.can_read or not leaf.needs_prefill for leaf in leaves_of(drafter))


def begin(drafter: Drafter[PyTree], target: Llama, batch: int, num_slots: int) -> PyTree:
    """Return the state of a drafter that has read nothing yet, for `batch` rows."""
    tokens = jnp.zeros((batch, 1 if can_read(drafter) else num_slots), jnp.int32)
    if not features_of(drafter):
        return drafter.init(tokens, num_slots, NO_SIGNALS)
    features = jnp.zeros((batch, 1, len(features_of(drafter)), target.config.hidden_size), target.dtype)
    return drafter.init(tokens, num_slots, PromptSignals(features, jnp.ones(batch, jnp.int32), target))


def prefill_chunk(
    drafter: Drafter[State], state: State, tokens: Array, start: Array, count: Array, signals: PromptSignals
) -> State:
    """Return the state of `drafter` after the next ``count[b]`` tokens of each row.

    Args:
        drafter: a drafter for which `can_read` is True.
        tokens: ``int32[B, C + 1]``, from position ``start[b]`` on: the tokens to read and the next token, followed by
            arbitrary values.
        start: ``int32[B]``; all positions before it have been read.
        count: ``int32[B]`` in 0 .. C; 0 leaves a row unchanged, except for slots after its last token.
        signals: ``features [B, C, F, E]`` of these tokens and the ``target``, for a drafter that requests features.
    """
    return drafter.read(state, tokens, start, count, signals) if drafter.can_read else state


def where_read(count: Array, new: Tree, old: Tree) -> Tree:
    """Select the pytree `new` in rows that have read at least one token, and `old` in the other rows."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where((count > 0).reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
