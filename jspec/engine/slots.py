# pyright: strict, reportUnknownMemberType=false
"""Slots: the rows of one batch that never ends, allocated once, in which requests come and go."""

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.core.sampling import LogitsTransforms, TokenCounts, broadcast_rows
from jspec.core.types import pytree
from jspec.decoding.state import DecodeState, RequestParams
from jspec.drafters.base import tree_of
from jspec.drafters.late_reading import begin
from jspec.models.kv_cache import KVCache, whole_tiles

# Transforms that change nothing; the bias is zeros, as many as there are tokens.
NEUTRAL = LogitsTransforms(temperature=1.0, top_k=0.0, tail_mass=0.0, min_p=0.0, repetition=1.0, presence=0.0,
                           frequency=0.0, bias=None)  # fmt: skip


_MEDIUM = 4  # tokens to draft: seldom far from the best


class Needs(enum.IntEnum):
    """What a round must be able to do for a row; for several the most of it."""

    LEAN = 0  # a temperature
    FULL = 1  # filters, penalties, log-probabilities of the likeliest tokens as well
    CONSTRAINED = 2  # ask the host which tokens may follow as well


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What fixes the shapes of an engine's programs.

    Attributes:
        slots: S, requests at once.
        length: the longest text, prompt included.
        eos_ids: how many tokens of a request may end it.
        chunks: C, numbers of tokens that a prompt is read by, ascending.
        num_draft_tokens: K, numbers of tokens to draft a round, ascending; 0 is plain decoding.
        rounds: the most of one call.
        top_logprobs: of how many of the likeliest tokens requests may ask, and the vocabulary has.
        fewer: numbers of slots, below all, that a call may play alone, ascending: where rows cost, whether used or not.
    """

    slots: int
    length: int
    eos_ids: int
    chunks: tuple[int, ...]
    num_draft_tokens: tuple[int, ...]
    rounds: int
    top_logprobs: int = 0
    fewer: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[tuple[int, Needs]]:
        """How many slots a call may play, and for what needs: each is another two programs.

        Constrained requests, whose programs are compiled at every start, have none for a number between one and all.
        """
        return [(count, needs) for count in (*self.fewer, self.slots) for needs in Needs
                if count in (1, self.slots) or needs is not Needs.CONSTRAINED]  # fmt: skip

    def shape(self, moving: int, needs: Needs) -> tuple[int, Needs]:
        """The smallest of those in which so many slots can move, whose requests need no more than that."""
        return min(shape for shape in self.shapes if shape[0] >= moving and shape[1] >= needs)

    def rows(self, moving: Sequence[int], count: int) -> list[int] | None:
        """Those slots, and others to make up the number that a call plays; None for all."""
        if count == self.slots:
            return None
        others = (slot for slot in range(self.slots) if slot not in moving)
        return [*moving, *itertools.islice(others, count - len(moving))]

    def kinds(self, *needs: Needs) -> list[tuple[int, Needs, int]]:
        """What calls there are for such needs: how far to draft, the needs, and how many slots."""
        return [(k, its, count) for count, its in self.shapes if its in needs for k in self.lengths(its, count)]

    def lengths(self, needs: Needs, count: int) -> tuple[int, ...]:
        """Those of `num_draft_tokens` that a call of so many slots may have.

        Of requests that need more than a temperature, and of fewer slots than all, there are two: fewer programs.
        """
        if (needs is Needs.LEAN and count == self.slots) or len(self.num_draft_tokens) < 3:
            return self.num_draft_tokens
        first, second, *_ = self.num_draft_tokens
        return first, max(k for k in self.num_draft_tokens if k <= max(_MEDIUM, second))

    def positions(self, drafter: Any) -> int:
        """T, of a slot's cache: the longest text and what is written behind it; no less than a chunk.

        That is a round's draft, or a piece of nothing while others are read.
        """
        behind = tree_of(drafter, self.num_draft_tokens[-1]).size + 1 if drafter is not None else 1
        return whole_tiles(max(self.length + max(behind, self.chunks[0]), self.chunks[-1]))


@pytree
class Slots:
    """S rows, each of which holds a request, or what is left of one.

    A row that is done no longer moves: it is empty, it is still reading its prompt, or its text has ended. Its cache
    holds ``lengths - 1`` tokens whatever it is, so that another request may begin with the same ones.

    Attributes:
        params, state: as in a generation, with S rows; ``state.tokens`` has T + 1 columns.
        given: ``int32[S]``, how many tokens a request came with: its prompt, and behind it what it had written before
            it was seated here.
        read: ``int32[S]``, how many tokens of its text the drafter has read for sure. Counted only for one that reads
            by itself; others know what the target knows.
    """

    params: RequestParams
    state: DecodeState
    given: Array
    read: Array


def empty_slots(target: Any, drafter: Any, sizes: Sizes) -> Slots:
    """Storage for everything; no request yet."""
    count, vocab_size, positions = sizes.slots, target.config.vocab_size, sizes.positions(drafter)
    ones, zeros = jnp.ones(count, jnp.int32), jnp.zeros((count, vocab_size), jnp.int32)
    transforms = neutral_transforms(count, vocab_size)
    params = RequestParams(
        keys=jax.random.split(jax.random.key(0, impl="threefry2x32"), count),
        prompt_lengths=jnp.copy(ones),  # what is donated may be there once only
        limits=jnp.copy(ones),
        eos_ids=jnp.full((count, sizes.eos_ids), -1, jnp.int32),
        transforms=transforms,
        draft_transforms=jax.tree.map(jnp.copy, transforms),
        min_tokens=jnp.zeros(count, jnp.int32),
        top_logprobs=jnp.zeros(count, jnp.int32),
        constraints=jnp.zeros(count, jnp.int32),
        coupled=jnp.ones(count, bool),
    )
    state = DecodeState(
        tokens=jnp.zeros((count, positions + 1), jnp.int32),
        lengths=jnp.ones(count, jnp.int32),
        done=jnp.ones(count, bool),
        cache=target.new_cache(count, positions),
        drafter=() if drafter is None else begin(drafter, target, count, positions),
        token_counts=TokenCounts(zeros.astype(bool), zeros),
        draft_length=(),
    )
    return Slots(params, state, jnp.copy(ones), jnp.zeros(count, jnp.int32))


def neutral_transforms(count: int, vocab_size: int) -> LogitsTransforms:
    """`NEUTRAL` for every row, so that any request fits the same program."""
    bias = jnp.zeros((count, vocab_size), jnp.float32)
    return dataclasses.replace(broadcast_rows(NEUTRAL, count), bias=bias)


def lean(transforms: LogitsTransforms) -> LogitsTransforms:
    """`transforms` but for everything beside temperature, for calls in which no row asks for more."""
    return LogitsTransforms(transforms.temperature, None, None, None, None, None, None, None)


def some(held: Any, rows: Array) -> Any:
    """`held`, of all slots, as a batch of some ``rows[B]``; a cache stays as it is and is told which are meant."""

    def one(leaf: Any) -> Any:
        return dataclasses.replace(leaf, rows=rows) if isinstance(leaf, KVCache) else leaf[rows]

    return jax.tree.map(one, held, is_leaf=_is_cache)


def with_some(held: Any, batch: Any, rows: Array) -> Any:
    """`held` with what has become of `some` rows of it."""

    def one(leaf: Any, new: Any) -> Any:
        return dataclasses.replace(new, rows=None) if isinstance(leaf, KVCache) else leaf.at[rows].set(new)

    return jax.tree.map(one, held, batch, is_leaf=_is_cache)


def _is_cache(held: Any) -> bool:
    return isinstance(held, KVCache)


def take(rows: Any, slot: Array) -> Any:
    """Row `slot` of every leaf, as a batch of one."""

    def one(leaf: Array) -> Array:
        return lax.dynamic_slice_in_dim(leaf, slot, 1, 0)

    return jax.tree.map(one, rows)


def put(rows: Any, row: Any, slot: Array) -> Any:
    """`rows` with a batch of one in row `slot` of every leaf."""

    def one(leaf: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), slot, 0)

    return jax.tree.map(one, rows, row)
