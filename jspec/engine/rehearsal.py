"""Before the first request: what pieces and rounds cost, measured one after another on texts of nobody's."""

import itertools
from time import perf_counter

import jax
import numpy as np

from jspec.engine.device import Device
from jspec.engine.news import unpack
from jspec.engine.pace import Pace
from jspec.engine.request import Request
from jspec.engine.slots import Needs

_TURNS, _SECONDS = 5, 3.0  # so many, of which none begins later than that
_READINGS = 3  # of each piece, of which the fastest counts


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
    sizes = device.sizes
    begun = perf_counter()
    for _ in range(_TURNS):
        if perf_counter() - begun > _SECONDS:
            break
        _fill(device)
        for count, needs in itertools.product(sizes.counts, (Needs.LEAN, Needs.FULL)):
            for k in sizes.lengths(needs, count):
                if seconds := _cost(device, k, needs, count, pace.rounds((k, needs, count))):
                    pace.learn((k, needs, count), seconds)


def _cost(device: Device, num_draft_tokens: int, needs: Needs, count: int, rounds: int) -> float | None:
    """Seconds a round of so many slots, as the loop would measure it: from call to call, with one more under way."""
    sizes, calls, ended, played = device.sizes, [], [], 0
    rows = sizes.rows(range(count))
    for _ in range(3):
        calls.append(device.play(num_draft_tokens, rounds, np.zeros(sizes.slots, bool), needs, rows=rows))
        if len(calls) > 1:
            news = unpack(calls[-2], range(count), sizes.top_logprobs if needs >= Needs.FULL else 0)
            ended.append(perf_counter())
            played = max(len(new.accepted) for new in news.values())
    device.wait()
    return (ended[1] - ended[0]) / played if played else None


def _fill(device: Device) -> None:
    """A text in every slot, with as much to write as there is room for."""
    sizes, text = device.sizes, (0, 0)
    request = Request(text, sizes.length - len(text), key=jax.random.key(0, impl="threefry2x32"))
    row = request.row(sizes.eos_ids, device.target.config.vocab_size)
    for slot in range(sizes.slots):
        device.seat(slot, row, len(text))
        device.read(slot, text, 0)
    device.wait()
