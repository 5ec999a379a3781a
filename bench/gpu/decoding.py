"""Decoding on the device: plain and speculative, bfloat16 and int8, each beside its prediction; and where time goes.

Programs are measured in groups, the most valuable first. A group is compiled together and runs in turns with plain
decoding of the target, which every speed-up is over.

Predicted for an H100 before the first run (`bench.compiled`, jax 0.10.1, 2 us a kernel, the published bandwidth):

    plain, ms: 3B 2.55, 8B 6.03, 1B 1.14, int8 3B 1.70
    1B drafts for the 3B, K = 1 to 4, ms: 3.65, 4.74, 5.86, 6.95; over plain: 1.26, 1.31, 1.28, 1.23
    int8 1B drafts, K = 2: 4.12 ms, 1.51 over plain
"""

import time
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from bench.abstract import trace
from bench.gpu import profile
from bench.gpu.bandwidth import read_bandwidth
from bench.gpu.programs import Case, Program, add_rows, compile_together, device_here, plain, speculative, timed
from bench.gpu.record import Record
from bench.gpu.sizes import Sizes, sizes
from bench.gpu.weights import random_model
from bench.timing import spread

PLAIN = "3B plain"
# Whose launches are looked at, once their group is measured.
_PROFILED = (PLAIN, "3B, 1B drafts K=2", "8B plain", "3B, int8 1B drafts K=2", "int8 3B plain")


def run(record: Record, rehearse: bool) -> None:
    """Measure all groups; a rehearsal has fewer."""
    size, reference = sizes(rehearse), {}
    bandwidth = read_bandwidth(record)
    for cases in _groups(record, size, rehearse):
        with record.attempt(", ".join(case.name for case in cases)):
            programs = reference | compile_together(record, cases)
            reference = {name: program for name, program in programs.items() if name == PLAIN}
            _group(record, programs, size, bandwidth, {case.name for case in cases})
    with record.attempt(f"gaps of {PLAIN} within graphs"):
        _gaps(record, reference[PLAIN].case, size)


def _group(record: Record, programs: Mapping[str, Program], size: Sizes, bandwidth: float, new: Set[str]) -> None:
    """Time all programs in turns, then trace those that are `new` and to be profiled."""
    timings = timed(record, programs, size.lengths, size.repeats)
    add_rows(record, programs, timings, PLAIN, bandwidth)
    for name in _PROFILED:
        if name in timings and name in new:
            with record.attempt(f"profile of {name}"):
                _profile(record, programs[name], spread(timings[name].seconds).median, size)


def _groups(record: Record, size: Sizes, rehearse: bool) -> Iterator[Sequence[Case]]:
    """Yield the cases to compile together; a model is made when its group comes."""
    begin = time.monotonic()
    target, draft = random_model(size.target, size.dtype, 0), random_model(size.draft, size.dtype, 1)
    record.add("models", seconds=time.monotonic() - begin)

    def drafted(k: int, what: str = "1B", model: Any = draft) -> Case:
        return speculative(f"3B, {what} drafts K={k}", target, model, k, size)

    yield [plain(PLAIN, target, size), drafted(2)]
    light = random_model(size.draft, size.dtype, 1, quantized=True)
    large = random_model(size.large, size.dtype, 2)
    if rehearse:  # one program of each kind
        yield [plain("int8 1B plain", light, size), plain("8B plain", large, size)]
        return
    yield [drafted(2, "int8 1B", light), plain("8B plain", large, size)]
    light_target = random_model(size.target, size.dtype, 0, quantized=True)
    yield [drafted(4, "int8 1B", light), plain("int8 3B plain", light_target, size)]
    yield [drafted(1), drafted(3), drafted(4), plain("1B plain", draft, size), drafted(3, "int8 1B", light)]


def _profile(record: Record, program: Program, seconds: float, size: Sizes) -> None:
    found, rounds = profile.traced(program, size.lengths[0])
    kernels = program.kernels.kernels
    record.add(f"profile of {program.case.name}", **profile.figures(found, kernels, rounds, device_here(), seconds))


def _gaps(record: Record, case: Case, size: Sizes) -> None:
    """Trace the program as it runs untraced: its kernels within CUDA graphs, whose instructions are then not named."""
    lowered = trace(case.target, case.draft, case.setting).lower()
    program = Program(case, lowered.compile({"xla_enable_command_buffers_during_profiling": True}), 0.0)
    for _ in range(2):  # graphs are built in the first two calls
        program(size.lengths[0])
    found, rounds = profile.traced(program, size.lengths[0])
    record.add(f"gaps of {case.name} within graphs", rounds=rounds, **profile.gaps(found))
