"""Warm-up before the first request: measure the costs of prefill pieces and rounds, one by one, on dummy text."""

import itertools
from collections.abc import Iterator, Sequence
from time import perf_counter

import jax
import numpy as np

from jspec.engine.request import Request
from jspec.engine.round_budget import RoundBudget
from jspec.engine.runner import Runner
from jspec.engine.slot_output import unpack
from jspec.engine.slots import Variant

_TURNS, _SECONDS = 5, 2.0  # maximum number of turns; seconds after which only the first two turns may start
_REPEATS = 2  # measurements of each piece; the fastest counts
_TEXT = (0, 0)

_Kind = tuple[int, Variant, int]


def warm_up(runner: Runner, round_budget: RoundBudget) -> None:
    """Measure the costs of prefill pieces, and of unconstrained rounds with each draft length. Empty the slots.

    The `runner` keeps the costs of pieces, and the `round_budget` keeps the costs of rounds. Costs are measured only if
    there is a choice. Without a warm-up, the first requests would pay for the measurements, and one disturbed call
    would affect many others. If the slots are too short to time every draft length here, the remaining lengths are
    timed while requests run.
    """
    sizes = runner.sizes
    if len(sizes.chunks) > 1:
        runner.costs = {size: _measure_piece(runner, size) for size in sizes.chunks}
    if len(sizes.num_draft_tokens) > 1:
        _measure_rounds(runner, round_budget)
    runner.reset()


def _measure_piece(runner: Runner, size: int) -> float:
    """Return the seconds that a piece takes. While all costs are equal, the runner prefills it as one piece."""
    times = [perf_counter()]
    for _ in range(_REPEATS):
        runner.prefill(0, (0,) * (size + 1), 0)
        runner.wait()
        times.append(perf_counter())
    return min(after - before for before, after in itertools.pairwise(times))


def _measure_rounds(runner: Runner, round_budget: RoundBudget) -> None:
    kinds = runner.sizes.kinds(Variant.TEMPERATURE_ONLY, Variant.FULL)
    begun = perf_counter()
    for turn in range(_TURNS):
        if turn > 1 and perf_counter() - begun > _SECONDS:
            break
        _fill_slots(runner)
        for kind, seconds in _round_costs(runner, round_budget, kinds):
            round_budget.record(kind, seconds)


def _round_costs(runner: Runner, round_budget: RoundBudget, kinds: Sequence[_Kind]) -> Iterator[tuple[_Kind, float]]:
    """Yield each kind's seconds per round, measured as in the loop: from the end of one call to the end of the next."""
    sizes, in_flight, ended = runner.sizes, None, None
    tokens_per_call = (sizes.length - len(_TEXT)) // (len(kinds) + 2)  # few enough that no text ends
    for kind in (kinds[0], *kinds, kinds[0]):  # the first call marks the start of the second; the last is not timed
        (k, variant, num_slots), stop = kind, np.zeros(sizes.slots, bool)
        num_rounds = max(1, min(round_budget.rounds(kind), tokens_per_call // (k + 1)))
        call = runner.decode_rounds(k, num_rounds, stop, variant, rows=sizes.rows(range(num_slots), num_slots))
        if in_flight is not None:
            previous, packed = in_flight
            num_top = sizes.top_logprobs if previous[1] >= Variant.FULL else 0
            outputs = unpack(packed, range(previous[2]), num_top)
            rounds = max(len(output.accepted) for output in outputs.values())
            begun, ended = ended, perf_counter()
            if begun is not None and rounds:
                yield previous, (ended - begun) / rounds
        in_flight = kind, call
    runner.wait()


def _fill_slots(runner: Runner) -> None:
    """Put a request into every slot, with as many tokens to decode as there is room for."""
    sizes = runner.sizes
    request = Request(_TEXT, sizes.length - len(_TEXT), key=jax.random.key(0, impl="threefry2x32"))
    row = request.row(sizes.eos_ids, runner.target.config.vocab_size)
    for slot in range(sizes.slots):
        runner.assign_slot(slot, row, len(_TEXT))
    if sizes.slots > 1:
        runner.prefill_batch({slot: (_TEXT, 0) for slot in range(sizes.slots)})
    else:
        runner.prefill(0, _TEXT, 0)
    runner.wait()
