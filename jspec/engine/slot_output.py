"""A call's output for every slot, packed into two arrays, because fewer copies to the host are faster."""

import dataclasses
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.core.types import pytree
from jspec.decoding.state import RoundOutput

_NUMBERS = ("count", "drafted", "judged", "accepted", "invalid", "strange")


@pytree
class Packed:
    """``int32[R + 1, S, W]`` and ``float32[R, S, W]`` for up to R rounds: new tokens, numbers, and top tokens.

    One more row of integers holds the state after the last round: whether each slot is done, and its `lag`.
    """

    integers: Array
    floats: Array


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


def pack(new: RoundOutput) -> Packed:
    """Pack one round's output, ``[S, ...]``."""
    numbers = jnp.stack([getattr(new, name).astype(jnp.int32) for name in _NUMBERS], axis=1)
    top_ids, tops = (part.reshape(len(part), -1) for part in (new.top_ids, new.top_logprobs))
    integers = jnp.concatenate([new.tokens, new.origins.astype(jnp.int32), numbers, top_ids], axis=1)
    return Packed(integers, jnp.concatenate([new.logprobs, new.raw_logprobs, new.distortion[:, None], tops], axis=1))


def empty(rounds: int, slots: int, num_draft_tokens: int, num_top: int) -> Packed:
    """Return the packed output of `rounds` rounds without new tokens."""
    tokens = (2 + num_top) * (num_draft_tokens + 1)
    integers = jnp.zeros((rounds + 1, slots, tokens + len(_NUMBERS)), jnp.int32)
    return Packed(integers, jnp.zeros((rounds, slots, tokens + 1), jnp.float32))


def with_round(packed: Packed, i: Array, one: Packed) -> Packed:
    """Return `packed` with the output of round i set to `one`."""
    return Packed(packed.integers.at[i].set(one.integers), packed.floats.at[i].set(one.floats))


def concluded(packed: Packed, done: Array, lag: Array) -> Packed:
    """Return `packed` with the state after the last round: for each row ``[S]``, whether it is done, and its lag."""
    last = jnp.stack([done.astype(jnp.int32), lag], axis=1)
    return Packed(packed.integers.at[-1, :, :2].set(last), packed.floats)


def of_all(packed: Packed, rows: Array, slots: int) -> Packed:
    """Expand the packed output of some `rows` to all slots, with zeros for the others."""

    def one(part: Array) -> Array:
        return jnp.zeros((len(part), slots, part.shape[2]), part.dtype).at[:, rows].set(part)

    return Packed(one(packed.integers), one(packed.floats))


@dataclasses.dataclass(frozen=True)
class News:
    """The output of one call for one slot.

    Attributes:
        tokens, origins, logprobs, raw_logprobs: values for each new token, as in `jspec.Output`.
        top_logprobs: the most likely tokens for each new token, as ids and raw log-probabilities; as many as the call
            computed. Empty for a slot that does not want them.
        accepted, judged, drafted: the number of accepted, verified and drafted tokens in each round, as in
            `jspec.Stats`.
        done: whether the row is inactive: its text has ended or was stopped, or it is still in prefill.
        lag: how many of the text's last tokens the drafter may not have read.
        invalid, strange: as in `jspec.decoding.state.RoundOutput`.
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
    lag: int
    invalid: bool
    strange: bool
    distortion: float


def unpack(packed: Any, slots: Iterable[int], num_top: int = 0, wanted: Container[int] = ()) -> dict[int, News]:
    """Wait for a call's output, and return the `News` of the given slots.

    Args:
        num_top: the number of most likely tokens that the call computed.
        wanted: the slots that want the most likely tokens.
    """
    integers, floats = jax.device_get((packed.integers, packed.floats))
    integers, last = integers[:-1], integers[-1]
    width, end = (integers.shape[2] - len(_NUMBERS)) // (2 + num_top), len(_NUMBERS)
    tokens, origins, others = integers[..., :width], integers[..., width : 2 * width], integers[..., 2 * width :]
    numbers, top_ids = others[..., :end], others[..., end:]
    named = dict(zip(_NUMBERS, np.moveaxis(numbers, 2, 0), strict=True))
    new = np.arange(width) < named["count"][..., None]
    played = named["count"] > 0

    def of_slot(slot: int) -> News:
        kept, rounds = new[:, slot], played[:, slot]
        row = floats[:, slot]
        tops = []
        if slot in wanted:
            ids, highest = (_likeliest(part, kept) for part in (top_ids[:, slot], row[:, 2 * width + 1 :]))
            tops = [list(zip(*one, strict=True)) for one in zip(ids, highest, strict=True)]
        return News(
            tokens=tokens[:, slot][kept].tolist(),
            origins=origins[:, slot][kept].tolist(),
            logprobs=row[:, :width][kept].tolist(),
            raw_logprobs=row[:, width : 2 * width][kept].tolist(),
            top_logprobs=tops,
            accepted=named["accepted"][rounds, slot].tolist(),
            judged=named["judged"][rounds, slot].tolist(),
            drafted=named["drafted"][rounds, slot].tolist(),
            done=bool(last[slot, 0]),
            lag=int(last[slot, 1]),
            invalid=bool(named["invalid"][:, slot].any()),
            strange=bool(named["strange"][:, slot].any()),
            distortion=float(row[:, 2 * width].sum()),
        )

    return {slot: of_slot(slot) for slot in slots}


def _likeliest(flat: np.ndarray, kept: np.ndarray) -> list[list[Any]]:
    """Return one list for each token in ``kept[R, K + 1]``, from ``flat[R, (K + 1) n]``."""
    return flat.reshape(*kept.shape, -1)[kept].tolist()


def of_prompt(pieces: Iterable[Piece], length: int, num_top: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Wait for a prompt's scores. Return each token's log-probability and the `num_top` most likely tokens."""
    logprobs, tops = [float("nan")] * length, [[] for _ in range(length)]
    for piece in pieces:
        scores, ids, highest = (part.tolist() for part in jax.device_get(tuple(vars(piece.scores).values())))
        for i, place in enumerate(range(piece.start + 1, min(piece.end + 1, length))):
            logprobs[place] = scores[i]
            tops[place] = list(zip(ids[i][:num_top], highest[i][:num_top], strict=True))
    return logprobs, tops
