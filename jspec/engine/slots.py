"""Slots: the rows of one endless batch. They are allocated once, and successive requests occupy them."""

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpy.typing import NDArray

from jspec.core.sampling import LogitsTransforms, TokenCounts, broadcast_rows
from jspec.core.types import PyTree, pytree
from jspec.decoding.state import DecodeState, RequestParams
from jspec.drafters.base import Drafter, tree_of
from jspec.drafters.chunked_prefill import begin
from jspec.models.kv_cache import KVCache, whole_tiles
from jspec.models.llama import Llama

Ints: TypeAlias = NDArray[np.int32]
Bools: TypeAlias = NDArray[np.bool_]
AnyDrafter: TypeAlias = Drafter[PyTree]  # a drafter with any type of state
Rows = TypeVar("Rows")  # a pytree whose leaves have one entry per row

# Transforms that change nothing. The bias, None here, becomes one zero for each token.
NEUTRAL = LogitsTransforms(
    temperature=1.0, top_k=0.0, tail_mass=0.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0, bias=None
)


_MEDIUM_LENGTH = 4  # a number of draft tokens that is rarely far from the best number


class Variant(enum.IntEnum):
    """A variant of the decoding program. A row's features determine its variant.

    A batch needs the maximum of its rows' variants.
    """

    TEMPERATURE_ONLY = 0  # temperature
    FULL = 1  # also filters, penalties, and log-probabilities of the most likely tokens
    CONSTRAINED = 2  # also a callback to the host for the allowed tokens


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that fix the shapes of an engine's programs.

    Attributes:
        slots: S, the number of requests to decode at once.
        length: the maximum sequence length, including the prompt.
        eos_ids: the maximum number of EOS tokens per request.
        chunks: C, the prefill chunk sizes, ascending.
        num_draft_tokens: K, the possible numbers of draft tokens per round, ascending; 0 is plain decoding.
        rounds: the maximum number of rounds per call.
        top_logprobs: the maximum number of top tokens that a request may specify; at most the vocabulary size.
        small_batch_sizes: the reduced slot counts that a call may use, ascending. They save time on devices on which
            idle rows cost time.
    """

    slots: int
    length: int
    eos_ids: int
    chunks: tuple[int, ...]
    num_draft_tokens: tuple[int, ...]
    rounds: int
    top_logprobs: int = 0
    small_batch_sizes: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[tuple[int, Variant]]:
        """The possible pairs of a call's number of slots and its variant; each pair adds two programs.

        Calls with constrained requests run one slot or all slots, because their programs are compiled at every start.
        """
        return [
            (count, variant)
            for count in (*self.small_batch_sizes, self.slots)
            for variant in Variant
            if count in (1, self.slots) or variant is not Variant.CONSTRAINED
        ]

    def shape(self, num_slots: int, variant: Variant) -> tuple[int, Variant]:
        """Return the smallest of `shapes` that has room for `num_slots` slots and supports `variant`."""
        return min(shape for shape in self.shapes if shape[0] >= num_slots and shape[1] >= variant)

    def rows(self, required: Sequence[int], count: int) -> list[int] | None:
        """Return `count` slots that include the `required` slots; None means all slots."""
        if count == self.slots:
            return None
        others = (slot for slot in range(self.slots) if slot not in required)
        return [*required, *itertools.islice(others, count - len(required))]

    def kinds(self, *variants: Variant) -> list[tuple[int, Variant, int]]:
        """Return the kinds of calls for the given variants, as (draft length, variant, number of slots)."""
        return [
            (k, variant, count)
            for count, variant in self.shapes
            if variant in variants
            for k in self.lengths(variant, count)
        ]

    def lengths(self, variant: Variant, count: int) -> tuple[int, ...]:
        """Return the possible draft lengths for a call with `count` slots.

        There are at most two lengths if requests need more than a temperature, or if the call does not run all slots.
        This keeps the number of compiled programs small.
        """
        if (variant is Variant.TEMPERATURE_ONLY and count == self.slots) or len(self.num_draft_tokens) < 3:
            return self.num_draft_tokens
        first, second, *_ = self.num_draft_tokens
        return first, max(k for k in self.num_draft_tokens if k <= max(_MEDIUM_LENGTH, second))

    def positions(self, drafter: AnyDrafter | None) -> int:
        """Return T, the length of a slot's KV cache: the longest text plus what is written after it (at least a chunk).

        A round writes its draft after the text. A prefill pass for other slots writes an unused piece there.
        """
        num_written = tree_of(drafter, self.num_draft_tokens[-1]).size + 1 if drafter is not None else 1
        return whole_tiles(max(self.length + max(num_written, self.chunks[0]), self.chunks[-1]))


@pytree
class Slots:
    """S rows, each of which holds a request or the data of a finished request.

    A row that is done is inactive: it is empty, it is still in prefill, or its text has ended. A row's KV cache always
    holds ``lengths - 1`` tokens, so that another request may reuse them as its prefix.

    Attributes:
        params, state: the parameters and state of a generation with S rows; ``state.tokens`` has T + 1 columns.
        num_prefix_tokens: ``int32[S]``, the number of tokens that the request had when it got the slot: its prompt,
            plus the tokens that were decoded earlier.
        num_drafter_read: ``int32[S]``, the number of the row's tokens that the drafter has certainly read. It is
            tracked only for a drafter that reads text separately; other drafters have read what the target has read.
    """

    params: RequestParams
    state: DecodeState
    num_prefix_tokens: Array
    num_drafter_read: Array


def empty_slots(target: Llama, drafter: AnyDrafter | None, sizes: Sizes) -> Slots:
    """Allocate slots without requests."""
    count, vocab_size, positions = sizes.slots, target.config.vocab_size, sizes.positions(drafter)
    ones, zeros = jnp.ones(count, jnp.int32), jnp.zeros((count, vocab_size), jnp.int32)
    transforms = neutral_transforms(count, vocab_size)
    params = RequestParams(
        keys=jax.random.split(jax.random.key(0, impl="threefry2x32"), count),
        prompt_lengths=jnp.copy(ones),  # a donated array may appear only once
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
    """Return `NEUTRAL` for every row, so that any request fits the same program."""
    bias = jnp.zeros((count, vocab_size), jnp.float32)
    return dataclasses.replace(broadcast_rows(NEUTRAL, count), bias=bias)


def keep_temperature(params: RequestParams) -> RequestParams:
    """Remove all sampling parameters except the temperature from `params`, for calls in which no row uses others."""
    transforms, draft_transforms = (
        LogitsTransforms(one.temperature, None, None, None, None, None, None, None)
        for one in (params.transforms, params.draft_transforms)
    )
    params = dataclasses.replace(params, transforms=transforms, draft_transforms=draft_transforms)
    return dataclasses.replace(params, min_tokens=None, top_logprobs=None, constraints=None)


def gather_rows(slots: Rows, rows: Array) -> Rows:
    """Return the given ``rows[B]`` of `slots` as a batch. A KV cache keeps all rows; its `rows` field selects some."""

    def gather(leaf: Array | KVCache) -> Array | KVCache:
        return dataclasses.replace(leaf, rows=rows) if isinstance(leaf, KVCache) else leaf[rows]

    return jax.tree.map(gather, slots, is_leaf=_is_cache)


def scatter_rows(slots: Rows, batch: Rows, rows: Array) -> Rows:
    """Return `slots` with `batch`, an updated result of `gather_rows`, written back."""

    def scatter(leaf: Array | KVCache, new: Array | KVCache) -> Array | KVCache:
        if isinstance(leaf, KVCache):
            return dataclasses.replace(cast(KVCache, new), rows=None)
        return leaf.at[rows].set(cast(Array, new))

    return jax.tree.map(scatter, slots, batch, is_leaf=_is_cache)


def _is_cache(node: object) -> bool:
    return isinstance(node, KVCache)


def get_row(rows: Rows, slot: Array) -> Rows:
    """Return row `slot` of every leaf, as a batch of one."""

    def get(leaf: Array) -> Array:
        return lax.dynamic_slice_in_dim(leaf, slot, 1, 0)

    return jax.tree.map(get, rows)


def set_row(rows: Rows, row: Rows, slot: Array) -> Rows:
    """Return `rows` with a batch of one in row `slot` of every leaf."""

    def update(leaf: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), slot, 0)

    return jax.tree.map(update, rows, row)


def select(condition: Array, first: Rows, second: Rows) -> Rows:
    """Select one of two pytrees by a scalar predicate."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(condition, a, b)

    return jax.tree.map(pick, first, second)
