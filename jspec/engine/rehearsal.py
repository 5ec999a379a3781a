"""Before the first request: what rounds of each kind cost, measured one after another on texts of nobody's."""

from time import perf_counter

import jax
import numpy as np

from jspec.engine.device import Device
from jspec.engine.news import unpack
from jspec.engine.pace import Pace
from jspec.engine.request import Request

_TURNS = 3


def rehearse(device: Device, pace: Pace) -> None:
    """Tell `pace` the costs of all lengths between which there is a choice; empties the slots.

    Else the first requests would pay for it, and one disturbed call choose for many. Where texts are too short for a
    call of each length, those that are left are learnt from requests.
    """
    sizes = device.sizes
    if len(sizes.num_draft_tokens) == 1:
        return
    for _ in range(_TURNS):
        _fill(device)
        for is_lean in (True, False):
            for k in sizes.lengths(is_lean):
                begun = perf_counter()
                packed = device.play(k, pace.rounds((k, is_lean)), np.zeros(sizes.slots, bool), is_lean)
                news = unpack(packed, range(sizes.slots), 0 if is_lean else sizes.top_logprobs)
                seconds = perf_counter() - begun
                if rounds := max(len(new.accepted) for new in news.values()):
                    pace.learn((k, is_lean), seconds / rounds)
    device.reset()


def _fill(device: Device) -> None:
    """A text in every slot, with as much to write as there is room for."""
    sizes, text = device.sizes, (0, 0)
    request = Request(text, sizes.length - len(text), key=jax.random.key(0, impl="threefry2x32"))
    row = request.row(sizes.eos_ids, device.target.config.vocab_size)
    for slot in range(sizes.slots):
        device.seat(slot, row, len(text))
        device.read(slot, text, 0)
    device.wait()
