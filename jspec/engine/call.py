"""A dispatched device call whose output has not been collected."""

import dataclasses
from typing import TypeAlias

from jspec.engine.scheduler import ActiveRequest
from jspec.engine.slot_output import Packed
from jspec.engine.slots import Variant

Kind: TypeAlias = tuple[int, Variant, int]  # a call's draft length, variant and number of slots


@dataclasses.dataclass(frozen=True)
class Call:
    """A dispatched call that runs rounds.

    Attributes:
        decoding: the decoding requests, by slot.
        num_caught_up: each request's `num_caught_up` at dispatch, by slot.
        dispatched_at: when the call was dispatched, by `time.perf_counter`.
        alone: whether no prefill ran between the previous call and this one.
        rounds: the number of rounds in a full call.
    """

    packed: Packed
    decoding: dict[int, ActiveRequest]
    num_caught_up: dict[int, int]
    kind: Kind
    dispatched_at: float
    alone: bool
    rounds: int
