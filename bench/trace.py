"""A breakdown of a round's time from a profiler trace of the compiled program: python -m bench trace."""

import collections
import dataclasses
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import seconds

PHASES = ("prefill", "draft", "verify", "accept", "commit")
# These instructions only contain others, whose time they include.
_CONTAINERS = ("while", "call", "conditional")


@dataclasses.dataclass(frozen=True)
class Event:
    """One execution of an instruction, in nanoseconds."""

    phase: str
    start: float
    end: float


def phases(hlo: str) -> dict[str, str | None]:
    """Return instruction -> the phase whose `jax.named_scope` it was traced in, "other", or None for a container."""
    found: dict[str, str | None] = {}
    for name, op, rest in re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\((.*)$", hlo, re.M):
        scopes = re.search(r'op_name="([^"]*)"', rest)
        inside = [phase for phase in PHASES if scopes and f"/{phase}/" in scopes[1]]
        found[name] = None if op in _CONTAINERS else inside[0] if inside else "other"
    return found


def events(folder: Path, phase_of: dict[str, str | None]) -> list[Event]:
    """Return the executed instructions, read from the newest trace under `folder`."""
    file = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                phase = phase_of.get(str(name), "other") if name is not None else None
                if phase is not None:
                    found.append(Event(phase, event.start_ns, event.start_ns + event.duration_ns))
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of `spans`."""
    total, reached = 0.0, -np.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(found: list[Event], rounds: int) -> list[dict[str, Any]]:
    """Return one row per phase: its share of the time from first to last event, and its costs per round."""
    span = max(event.end for event in found) - min(event.start for event in found)
    rows = []
    counts = collections.Counter(event.phase for event in found)
    for phase in (*PHASES, "other"):
        busy = covered((event.start, event.end) for event in found if event.phase == phase)
        rows.append(
            {
                "phase": phase,
                "share, %": 100 * busy / span,
                "us per round": busy / rounds / 1e3,
                "instructions per round": counts[phase] / rounds,
            }
        )
    idle = span - covered((event.start, event.end) for event in found)
    rows.append(
        {
            "phase": "idle",
            "share, %": 100 * idle / span,
            "us per round": idle / rounds / 1e3,
            "instructions per round": 0.0,
        }
    )
    return rows


def run(subject: Subject, k: int, batch: int, new_tokens: int, temperature: float, keep: Path | None) -> None:
    """Trace one call after three untraced calls. If `keep` is given, write a Perfetto file there."""
    target, draft, request = subject.target, subject.draft, subject.request(batch, 32)
    sampling = jspec.SamplingParams(temperature=temperature)

    def decode(*models_and_request: Any) -> jspec.Output:
        options = {"max_new_tokens": new_tokens, "sampling": sampling}
        if k == 0:
            target, _, *request = models_and_request
            return jspec.generate(target, *request, **options)
        return jspec.speculative_generate(*models_and_request, num_draft_tokens=k, **options)

    program = jax.jit(decode).lower(target, draft, *request).compile()
    out = program(target, draft, *request)
    untraced = min(seconds(lambda: program(target, draft, *request)) for _ in range(3))
    rounds = int(np.max(out.stats.rounds))
    folder = keep or Path(tempfile.mkdtemp())
    with jax.profiler.trace(str(folder), create_perfetto_trace=keep is not None):
        traced = seconds(lambda: program(target, draft, *request))
    rows = summary(events(folder, phases(program.as_text() or "")), rounds)
    publish(
        f"trace-{subject.name}-k{k}-b{batch}-{jax.default_backend()}",
        f"{subject.name}: {rounds} rounds of K = {k}, batch {batch}, temperature {temperature:g}, {target.dtype}",
        rows,
        plots.shares,
        notes=[
            f"One call takes {untraced * 1e3:.4g} ms untraced and {traced * 1e3:.4g} ms traced; "
            "tracing slows short instructions most.",
            *([f"Open {perfetto} at https://ui.perfetto.dev" for perfetto in folder.rglob("perfetto_trace.json.gz")]),
        ],
        folder=subject.folder,
    )
