"""News: what a call has brought to every slot, packed into two arrays: fewer copies to the host are faster."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.state import RoundOutput
from jspec.types import pytree

_NUMBERS = ("count", "drafted", "judged", "accepted", "invalid", "strange")


@pytree
class Packed:
    """``int32[R + 1, S, 2 (K + 1) + 6]`` and ``float32[R, S, 2 (K + 1) + 1]``, of R rounds at most.

    What holds after the last round follows as one more line of integers: whether a row is done, and its `lag`.
    """

    integers: Array
    floats: Array


def pack(new: RoundOutput) -> Packed:
    """One round's, ``[S, ...]``."""
    numbers = jnp.stack([getattr(new, name).astype(jnp.int32) for name in _NUMBERS], axis=1)
    integers = jnp.concatenate([new.tokens, new.origins.astype(jnp.int32), numbers], axis=1)
    return Packed(integers, jnp.concatenate([new.logprobs, new.raw_logprobs, new.distortion[:, None]], axis=1))


def empty(rounds: int, slots: int, num_draft_tokens: int) -> Packed:
    """Of `rounds` rounds in which nothing happens."""
    tokens = 2 * (num_draft_tokens + 1)
    integers = jnp.zeros((rounds + 1, slots, tokens + len(_NUMBERS)), jnp.int32)
    return Packed(integers, jnp.zeros((rounds, slots, tokens + 1), jnp.float32))


def with_round(packed: Packed, i: Array, one: Packed) -> Packed:
    """With that of round i."""
    return Packed(packed.integers.at[i].set(one.integers), packed.floats.at[i].set(one.floats))


def concluded(packed: Packed, done: Array, lag: Array) -> Packed:
    """With which rows ``[S]`` are done after all, and by how many tokens the drafter is behind in each."""
    last = jnp.stack([done.astype(jnp.int32), lag], axis=1)
    return Packed(packed.integers.at[-1, :, :2].set(last), packed.floats)


@dataclasses.dataclass(frozen=True)
class News:
    """What one slot has gained in one call.

    Attributes:
        tokens, origins, logprobs, raw_logprobs: of the new tokens, as in `jspec.Output`.
        accepted, judged, drafted: of each round that was played, drafts, as counted in `jspec.Stats`.
        done: whether the row does not move any more: its text has ended or was stopped, or it is still being read.
        lag: how many of the last tokens of the text the drafter may not have read.
        invalid, strange: as in `jspec.state.RoundOutput`.
        distortion: as in `jspec.Stats`.
    """

    tokens: list[int]
    origins: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    accepted: list[int]
    judged: list[int]
    drafted: list[int]
    done: bool
    lag: int
    invalid: bool
    strange: bool
    distortion: float


def unpack(packed: Any, slots: Iterable[int]) -> dict[int, News]:
    """Those of some slots, from what a call has returned; waits for it."""
    integers, floats = np.asarray(packed.integers), np.asarray(packed.floats)
    integers, last = integers[:-1], integers[-1]
    width = (integers.shape[2] - len(_NUMBERS)) // 2
    tokens, origins, numbers = integers[..., :width], integers[..., width : 2 * width], integers[..., 2 * width :]
    named = dict(zip(_NUMBERS, np.moveaxis(numbers, 2, 0), strict=True))
    new = np.arange(width) < named["count"][..., None]
    played = named["count"] > 0

    def of_slot(slot: int) -> News:
        kept, rounds = new[:, slot], played[:, slot]
        row = floats[:, slot]
        return News(
            tokens=tokens[:, slot][kept].tolist(),
            origins=origins[:, slot][kept].tolist(),
            logprobs=row[:, :width][kept].tolist(),
            raw_logprobs=row[:, width : 2 * width][kept].tolist(),
            accepted=named["accepted"][rounds, slot].tolist(),
            judged=named["judged"][rounds, slot].tolist(),
            drafted=named["drafted"][rounds, slot].tolist(),
            done=bool(last[slot, 0]),
            lag=int(last[slot, 1]),
            invalid=bool(named["invalid"][:, slot].any()),
            strange=bool(named["strange"][:, slot].any()),
            distortion=float(row[:, -1].sum()),
        )

    return {slot: of_slot(slot) for slot in slots}
