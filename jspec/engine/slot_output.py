# pyright: reportIncompatibleMethodOverride=false
"""A call's output for every slot, packed into two arrays, because fewer copies to the host are faster."""

import dataclasses
import operator
from collections.abc import Container, Iterable
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from jspec.core.types import pytree
from jspec.decoding.state import RoundOutput
from jspec.engine.slots import Bools, Ints

_NUMBERS = ("count", "drafted", "judged", "accepted", "invalid", "out_of_vocab")


class _Pending(Protocol):  # a method of JAX arrays that their type lacks
    def is_ready(self) -> bool: ...


@pytree
class Packed:
    """``int32[R + 1, S, W]`` and ``float32[R, S, W]`` for up to R rounds: new tokens, numbers, and top tokens.

    One more row of integers holds the state after the last round: whether each slot is done, and its `num_unread`.
    """

    integers: Array
    floats: Array

    @property
    def is_ready(self) -> bool:
        """Whether the output can be read without waiting."""
        return cast(_Pending, self.integers).is_ready()


@pytree
class Scores:
    """The target's scores for a piece of text.

    Attributes:
        logprobs: ``float32[C]``, the raw log-probabilities of the tokens after the first.
        top_ids, top_logprobs: ``int32[C, n]`` and ``float32[C, n]``, the most likely tokens at each position, highest
            first, and their raw log-probabilities.
    """

    logprobs: Array
    top_ids: Array
    top_logprobs: Array


class Piece(NamedTuple):
    """A prefilled piece: `count` tokens from `start` on, and the scores of the tokens after them."""

    start: int
    count: int
    scores: Scores | None

    @property
    def end(self) -> int:
        """The number of tokens prefilled so far."""
        return self.start + self.count


def pack(output: RoundOutput) -> Packed:
    """Pack one round's output, ``[S, ...]``."""
    numbers = jnp.stack([part.astype(jnp.int32) for part in operator.attrgetter(*_NUMBERS)(output)], axis=1)
    top_ids, tops = (part.reshape(len(part), -1) for part in (output.top_ids, output.top_logprobs))
    integers = jnp.concatenate([output.tokens, output.origins.astype(jnp.int32), numbers, top_ids], axis=1)
    floats = [output.logprobs, output.raw_logprobs, output.distortion[:, None], tops]
    return Packed(integers, jnp.concatenate(floats, axis=1))


def empty_output(rounds: int, slots: int, num_draft_tokens: int, num_top: int) -> Packed:
    """Return the packed output of `rounds` rounds without new tokens."""
    tokens = (2 + num_top) * (num_draft_tokens + 1)
    integers = jnp.zeros((rounds + 1, slots, tokens + len(_NUMBERS)), jnp.int32)
    return Packed(integers, jnp.zeros((rounds, slots, tokens + 1), jnp.float32))


def set_round(packed: Packed, i: Array, output: Packed) -> Packed:
    """Return `packed` with the output of round i set to `output`."""
    return Packed(packed.integers.at[i].set(output.integers), packed.floats.at[i].set(output.floats))


def set_final_state(packed: Packed, done: Array, num_unread: Array) -> Packed:
    """Return `packed` with the final state of each row: ``done[S]`` and ``num_unread[S]``, as in `SlotOutput`."""
    last = jnp.stack([done.astype(jnp.int32), num_unread], axis=1)
    return Packed(packed.integers.at[-1, :, :2].set(last), packed.floats)


def expand_to_slots(packed: Packed, rows: Array, slots: int) -> Packed:
    """Expand the packed output of some `rows` to all slots, with zeros for the other slots."""

    def expand(part: Array) -> Array:
        return jnp.zeros((len(part), slots, part.shape[2]), part.dtype).at[:, rows].set(part)

    return Packed(expand(packed.integers), expand(packed.floats))


@dataclasses.dataclass(frozen=True)
class SlotOutput:
    """The output of one call for one slot.

    Attributes:
        tokens, origins, logprobs, raw_logprobs: values for each new token, as in `jspec.Output`.
        top_logprobs: all most likely tokens that the call computed for each new token, as ids and raw
            log-probabilities; empty for a slot that does not report them.
        accepted, judged, drafted: the number of accepted, verified and drafted tokens in each round, as in
            `jspec.Stats`.
        done: whether the row is inactive: its text has ended or was stopped, or it is still in prefill.
        num_unread: how many of the text's last tokens the drafter may not have read.
        invalid, out_of_vocab: as in `jspec.decoding.state.RoundOutput`.
        distortion: as in `jspec.Stats`.
    """

    tokens: list[int]
    origins: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    accepted: list[int]
    judged: list[int]
    drafted: list[int]
    done: bool
    num_unread: int
    invalid: bool
    out_of_vocab: bool
    distortion: float


def unpack(
    packed: Packed, slots: Iterable[int], num_top: int = 0, top_slots: Container[int] = ()
) -> dict[int, SlotOutput]:
    """Wait for a call's output, and return the `SlotOutput` of the given slots.

    Args:
        num_top: the number of most likely tokens that the call computed.
        top_slots: the slots that report the most likely tokens.
    """
    integers, floats = cast(tuple[Ints, NDArray[np.float32]], jax.device_get((packed.integers, packed.floats)))
    integers, last = integers[:-1], integers[-1]
    width, end = (integers.shape[2] - len(_NUMBERS)) // (2 + num_top), len(_NUMBERS)
    tokens, origins, others = integers[..., :width], integers[..., width : 2 * width], integers[..., 2 * width :]
    columns, top_ids = others[..., :end], others[..., end:]
    numbers: dict[str, Ints] = dict(zip(_NUMBERS, np.moveaxis(columns, 2, 0), strict=True))
    is_new = cast(Bools, np.arange(width) < numbers["count"][..., None])
    has_run = numbers["count"] > 0

    def of_slot(slot: int) -> SlotOutput:
        new, rounds = is_new[:, slot], has_run[:, slot]
        row = floats[:, slot]
        tops: list[list[tuple[int, float]]] = []
        if slot in top_slots:
            ids, highest = (_per_token(part, new) for part in (top_ids[:, slot], row[:, 2 * width + 1 :]))
            tops = [
                cast(list[tuple[int, float]], list(zip(*pair, strict=True))) for pair in zip(ids, highest, strict=True)
            ]
        return SlotOutput(
            tokens=tokens[:, slot][new].tolist(),
            origins=origins[:, slot][new].tolist(),
            logprobs=row[:, :width][new].tolist(),
            raw_logprobs=row[:, width : 2 * width][new].tolist(),
            top_logprobs=tops,
            accepted=numbers["accepted"][rounds, slot].tolist(),
            judged=numbers["judged"][rounds, slot].tolist(),
            drafted=numbers["drafted"][rounds, slot].tolist(),
            done=bool(last[slot, 0]),
            num_unread=int(last[slot, 1]),
            invalid=bool(numbers["invalid"][:, slot].any()),
            out_of_vocab=bool(numbers["out_of_vocab"][:, slot].any()),
            distortion=float(row[:, 2 * width].sum()),
        )

    return {slot: of_slot(slot) for slot in slots}


def _per_token(flat: NDArray[np.int32 | np.float32], new: Bools) -> list[list[float]]:
    """Return a list of n values for each token that ``new[R, K + 1]`` marks, from ``flat[R, (K + 1) n]``."""
    return flat.reshape(*new.shape, -1)[new].tolist()


def prompt_scores(
    pieces: Iterable[Piece], length: int, num_top: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Wait for a prompt's scores. Return each token's log-probability and the `num_top` most likely tokens."""
    logprobs, tops = [float("nan")] * length, [list[tuple[int, float]]() for _ in range(length)]
    for piece in pieces:
        scores, ids, highest = (part.tolist() for part in jax.device_get(tuple(vars(piece.scores).values())))
        for i, position in enumerate(range(piece.start + 1, min(piece.end + 1, length))):
            logprobs[position] = scores[i]
            tops[position] = list(zip(ids[i][:num_top], highest[i][:num_top], strict=True))
    return logprobs, tops
