"""Before the first request: what pieces and rounds cost, measured one after another on texts of nobody's."""

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

_TURNS, _SECONDS = 5, 2.0  # so many, of which none but the first two begins later than that
_READINGS = 2  # of each piece, of which the faster counts
_TEXT = (0, 0)

_Kind = tuple[int, Needs, int]


def rehearse(device: Device, pace: Pace) -> None:
    """Tell `device` what its pieces cost, and `pace` the costs of all lengths, without constraints; empties the slots.

    Only of that between which there is a choice. Else the first requests would pay for it, and one disturbed call
    choose for many. Where texts are too short for a call of each length, those that are left are learnt from requests.
    """
    sizes = device.sizes
    if len(sizes.chunks) > 1:
        device.costs = {size: _cost_of_piece(device, size) for size in sizes.chunks}
    if len(sizes.num_draft_tokens) > 1:
        _rehearse_rounds(device, pace)
    device.reset()


def _cost_of_piece(device: Device, size: int) -> float:
    """Seconds, while costs that are alike make one piece of it."""
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
            pace.learn(kind, seconds, alone=turn > 0)  # a program's first call takes longer than others


def _costs(device: Device, pace: Pace, kinds: Sequence[_Kind]) -> Iterator[tuple[_Kind, float]]:
    """Seconds a round of each kind, as the loop would measure them: from call to call, with one more under way."""
    sizes, under_way, ended = device.sizes, None, None
    room = (sizes.length - len(_TEXT)) // (len(kinds) + 2)  # tokens a call, with which no text ends
    for kind in (kinds[0], *kinds, kinds[0]):  # the first says when the second began, the last is only under way
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
    """A text in every slot, with as much to write as there is room for."""
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
