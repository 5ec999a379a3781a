"""Decoding on the device: plain and speculative, in bfloat16, int8 and int4, with predictions and a time breakdown.

Programs are measured in groups, the most valuable first. The programs of a group are compiled together and run in turns
with plain decoding of the target, which is the reference for every speed-up. The reference is compiled alone, so that
nothing disturbs its autotuning and the first result comes early.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.gpu import profile
from bench.gpu.bandwidth import read_bandwidth
from bench.gpu.programs import Case, Program, add_rows, compile_together, device_here, plain, speculative, timed
from bench.gpu.record import Record
from bench.gpu.sizes import Sizes, sizes
from bench.gpu.weights import random_model
from bench.timing import spread
from jspec.core.devices import DEVICES

PLAIN = "3B plain"
# Programs to profile after the first three groups, because the profiler takes seconds to start.
_PROFILED, _BEFORE = (PLAIN, "3B, 1B drafts K=2", "8B plain", "3B, int8 1B drafts K=2"), 3
# Milliseconds per round on an H100, predicted before the first run with the formulas of `python -m bench compiled`: jax
# 0.10.1, kernels without autotuning, 2 us per kernel, and the published bandwidth.
_AHEAD = {
    PLAIN: 2.55,
    "8B plain": 5.38,
    "1B plain": 1.14,
    "int8 3B plain": 1.70,
    "3B, 1B drafts K=1": 3.65,
    "3B, 1B drafts K=2": 4.74,
    "3B, 1B drafts K=3": 5.86,
    "3B, 1B drafts K=4": 6.95,
    "3B, int8 1B drafts K=2": 4.12,
}


def run(record: Record, rehearse: bool) -> None:
    """Measure all groups. A rehearsal has fewer groups."""
    size, kept, taken = sizes(rehearse), {}, {}
    bandwidth = read_bandwidth(record)
    ahead = _AHEAD if device_here() == DEVICES["h100"] else {}
    for done, cases in enumerate(_groups(record, size, rehearse)):
        if done == _BEFORE:
            _profiles(record, kept, taken, size)
        with record.attempt(", ".join(case.name for case in cases)):
            reference = {name: program for name, program in kept.items() if name == PLAIN}
            programs = reference | compile_together(record, cases)
            timings = timed(record, programs, size.lengths, size.repeats)
            add_rows(record, programs, timings, PLAIN, bandwidth, ahead)
            new = [name for name in timings if name in _PROFILED and name not in kept]
            kept |= {name: programs[name] for name in new}
            taken |= {name: spread(timings[name].seconds).median for name in new}
    if rehearse:
        _profiles(record, kept, taken, size)


def _profiles(record: Record, programs: dict[str, Program], seconds: Mapping[str, float], size: Sizes) -> None:
    """Profile each of `programs`, then drop all except plain decoding. `seconds` holds the times of untraced rounds."""
    for name in [*programs]:
        with record.attempt(f"profile of {name}"):
            _profile(record, programs[name], seconds[name], size)
        if name != PLAIN:
            del programs[name]


def _groups(record: Record, size: Sizes, rehearse: bool) -> Iterator[Sequence[Case]]:
    """Yield groups of cases to compile together. A model is created when its group is due."""
    begin = time.monotonic()
    target, draft = random_model(size.target, size.dtype, 0), random_model(size.draft, size.dtype, 1)
    record.add("models", seconds=time.monotonic() - begin)

    def drafted(k: int, what: str = "1B", model: Any = draft) -> Case:
        return speculative(f"3B, {what} drafts K={k}", target, model, k, size)

    yield [plain(PLAIN, target, size)]
    yield [drafted(2)]
    int8_draft, int4_draft = (random_model(size.draft, size.dtype, 1, kind) for kind in ("int8", "int4"))
    large = random_model(size.large, size.dtype, 2)
    if rehearse:  # one program of each kind
        yield [plain("int8 1B plain", int8_draft, size), plain("8B plain", large, size)]
        yield [plain("int4 1B plain", int4_draft, size)]
        return
    yield [drafted(2, "int8 1B", int8_draft), plain("8B plain", large, size), plain("1B plain", draft, size)]
    del large
    yield [drafted(4, "int4 1B", int4_draft), drafted(4, "int8 1B", int8_draft)]
    for kind in ("int8", "int4"):
        yield [plain(f"{kind} 3B plain", random_model(size.target, size.dtype, 0, kind), size)]
    yield [drafted(1), drafted(3), drafted(4), drafted(3, "int8 1B", int8_draft)]


def _profile(record: Record, program: Program, seconds: float, size: Sizes) -> None:
    found, rounds = profile.traced(program, size.lengths[0])
    kernels = program.kernels.kernels
    record.add(f"profile of {program.case.name}", **profile.figures(found, kernels, rounds, device_here(), seconds))
