"""A breakdown of a round's time on the device: the costliest kernels with their predictions, and the gaps between them.

The profiler launches kernels one by one (`xla_enable_command_buffers_during_profiling` is off), so the gaps in a trace
are wider than those in an ordinary call. Kernel times are not affected. A round's idle time is therefore its untraced
time minus its kernel times.
"""

import collections
import dataclasses
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from bench import compiled
from bench.trace import covered
from jspec.core.devices import Device

COSTLIEST = 10


@dataclasses.dataclass(frozen=True)
class Launch:
    """One execution of a kernel. `op` is the instruction in the compiled program, and times are in nanoseconds."""

    op: str
    start: float
    end: float


def launches(folder: Path) -> list[Launch]:
    """Read the newest trace under `folder`: the first GPU's streams or, on CPU, the instructions of all threads."""
    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    lines = [
        line
        for plane in planes
        if plane.name == "/device:GPU:0"
        for line in plane.lines
        if line.name.startswith("Stream")
    ]
    on_device = bool(lines)
    found = []
    for line in lines or [line for plane in planes for line in plane.lines]:
        for event in line.events:
            op = dict(event.stats).get("hlo_op") or (event.name if on_device else None)
            if op is not None:
                found.append(Launch(str(op), event.start_ns, event.start_ns + event.duration_ns))
    return found


def traced(program: Any, limit: int) -> tuple[list[Launch], int]:
    """Return the launches of one call of a `bench.gpu.programs.Program`, and its number of rounds."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = 0 if jax.default_backend() != "cpu" else 2, 0
        with jax.profiler.trace(folder, profiler_options=options):
            rounds = int(jax.block_until_ready(program(limit)).stats.rounds.max())
        return launches(Path(folder)), rounds


def figures(
    found: Sequence[Launch], kernels: Sequence[compiled.Kernel], rounds: int, device: Device, seconds: float
) -> dict[str, Any]:
    """Summarise a trace of `rounds` rounds, given the `kernels` of one round, which takes `seconds` untraced.

    Launches that are not instructions of a round, such as the prefill and copies to the host, are excluded.
    """
    by_op = {_plain(kernel.name): kernel for kernel in kernels}
    inside = [(by_op[_plain(launch.op)], launch) for launch in found if _plain(launch.op) in by_op]
    if not inside:
        raise ValueError(
            f"None of the {len(found)} launches in the trace is an instruction of a round; look at how "
            f"the profiler names them: {sorted({launch.op for launch in found})[:10]}."
        )
    begin, end = min(launch.start for _, launch in inside), max(launch.end for _, launch in inside)
    within = [launch for launch in found if begin <= launch.start <= end]
    busy = sum(launch.end - launch.start for _, launch in inside) / rounds
    gaps = (end - begin - covered((launch.start, launch.end) for launch in within)) / rounds
    return {
        "rounds": rounds,
        "ms": seconds * 1e3,
        "kernel_ms": busy / 1e6,
        "idle_ms": seconds * 1e3 - busy / 1e6,
        "idle_us_a_kernel": (seconds * 1e6 - busy / 1e3) * rounds / len(inside),
        "gaps_in_trace_ms": gaps / 1e6,
        "kernels_a_round": len(inside) / rounds,
        "parts": _by(inside, lambda kernel: kernel.part or "other", rounds, device),
        "costliest": _by(inside, _kind, rounds, device)[:COSTLIEST],
    }


def _by(
    inside: Iterable[tuple[compiled.Kernel, Launch]], key: Any, rounds: int, device: Device
) -> list[dict[str, Any]]:
    """Return one row for each `key` of a kernel, the costliest first.

    Microseconds, megabytes and counts are per round.
    """
    groups = collections.defaultdict(list)
    for kernel, launch in inside:
        groups[key(kernel)].append((kernel, launch.end - launch.start))
    rows = []
    for name, members in groups.items():
        taken = sum(time for _, time in members) / rounds
        moved = sum(kernel.read + kernel.written for kernel, _ in members) / rounds
        alone = [kernel.seconds(device) / kernel.times for kernel, _ in members]
        rows.append(
            {
                "kernel": name,
                "count": len(members) / rounds,
                "us": taken / 1e3,
                "predicted_us": 1e6 * sum(alone) / rounds,
                "mb": moved / 1e6,
                "gb_per_s": moved / taken if taken else 0.0,
            }
        )
    return sorted(rows, key=lambda row: -row["us"])


def _kind(kernel: compiled.Kernel) -> str:
    """Return a name that the same kernel has in every layer."""
    name, shape = re.sub(r"[.\d]+$", "", kernel.name), re.sub(r"{[^}]*}", "", kernel.shape)
    return f"{name} {shape} ({kernel.part or 'other'})"


def _plain(op: str) -> str:
    """Return an instruction's name as it appears in kernel names, which contain neither points nor hyphens."""
    return re.sub(r"\W", "_", op)
