"""Warm-up before the first request, which measures the costs of pieces and rounds, one by one, on dummy text."""

import itertools
from collections.abc import Iterator, Sequence
from time import perf_counter

import jax
import numpy as np

from jspec.engine.request import Request
from jspec.engine.round_budget import Pace
from jspec.engine.runner import Device
from jspec.engine.slot_output import unpack
from jspec.engine.slots import Needs

_TURNS, _SECONDS = 5, 2.0  # number of turns; after the second, none begins later than this many seconds
_READINGS = 2  # measurements of each piece; the fastest counts
_TEXT = (0, 0)

_Kind = tuple[int, Needs, int]


def rehearse(device: Device, pace: Pace) -> None:
    """Measure the cost of pieces for `device`, and of unconstrained rounds of all lengths for `pace`. Empty the slots.

    Measure only if there is a choice. Without a warm-up, the first requests would pay for the measurements, and one
    disturbed call would affect many others. If sequences are too short for a call of each length, later requests
    measure the remaining lengths.
    """
    sizes = device.sizes
    if len(sizes.chunks) > 1:
        device.costs = {size: _cost_of_piece(device, size) for size in sizes.chunks}
    if len(sizes.num_draft_tokens) > 1:
        _rehearse_rounds(device, pace)
    device.reset()


def _cost_of_piece(device: Device, size: int) -> float:
    """Return how many seconds a piece takes. While all costs are equal, the device reads it as one piece."""
    times = [perf_counter()]
    for _ in range(_READINGS):
        device.read(0, (0,) * (size + 1), 0)
        device.wait()
        times.append(perf_counter())
    return min(after - before for before, after in itertools.pairwise(times))


def _rehearse_rounds(device: Device, pace: Pace) -> None:
    kinds = device.sizes.kinds(Needs.LEAN, Needs.FULL)
    begun = perf_counter()
    for turn in range(_TURNS):
        if turn > 1 and perf_counter() - begun > _SECONDS:
            break
        _fill(device)
        for kind, seconds in _costs(device, pace, kinds):
            pace.learn(kind, seconds, alone=turn > 0)  # a program's first call takes longer than later ones


def _costs(device: Device, pace: Pace, kinds: Sequence[_Kind]) -> Iterator[tuple[_Kind, float]]:
    """Yield the seconds per round of each kind, measured as in the loop: from call to call, while another call runs."""
    sizes, under_way, ended = device.sizes, None, None
    room = (sizes.length - len(_TEXT)) // (len(kinds) + 2)  # tokens per call, few enough that no text ends
    for kind in (kinds[0], *kinds, kinds[0]):  # the first times the start of the second, the last only runs
        (k, needs, count), stop = kind, np.zeros(sizes.slots, bool)
        played = max(1, min(pace.rounds(kind), room // (k + 1)))
        call = device.play(k, played, stop, needs, rows=sizes.rows(range(count), count))
        if under_way is not None:
            before, packed = under_way
            num_top = sizes.top_logprobs if before[1] >= Needs.FULL else 0
            rounds = max(len(new.accepted) for new in unpack(packed, range(before[2]), num_top).values())
            begun, ended = ended, perf_counter()
            if begun is not None and rounds:
                yield before, (ended - begun) / rounds
        under_way = kind, call
    device.wait()


def _fill(device: Device) -> None:
    """Put a request into every slot, with as many tokens to decode as there is room for."""
    sizes = device.sizes
    request = Request(_TEXT, sizes.length - len(_TEXT), key=jax.random.key(0, impl="threefry2x32"))
    row = request.row(sizes.eos_ids, device.target.config.vocab_size)
    for slot in range(sizes.slots):
        device.seat(slot, row, len(_TEXT))
    if sizes.slots > 1:
        device.read_several({slot: (_TEXT, 0) for slot in range(sizes.slots)})
    else:
        device.read(0, _TEXT, 0)
    device.wait()
