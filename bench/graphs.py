"""Count what XLA captures in command buffers. On NVIDIA GPUs, these are CUDA graphs, each launched as a unit."""

import dataclasses
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_LISTS = "*decode_program*thunk_sequence_after_thunk_passes.txt"
_LINE = re.compile(r"( *)(?:\d+: (k\w+)|(condition|body):)")
_GRAPH, _LOOP = "kCommandBuffer", "kWhile"


@dataclasses.dataclass(frozen=True)
class Graphs:
    """Counts of what the host launches in a round.

    Attributes:
        launched: the number of graphs.
        captured: the number of kernels and copies in those graphs.
        outside: the number of kernels and copies that are launched one by one, including loop conditions.
    """

    launched: int = 0
    captured: int = 0
    outside: int = 0

    def __add__(self, other: "Graphs") -> "Graphs":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Graphs(*(one + two for one, two in pairs))


@dataclasses.dataclass
class _Thunk:
    """A launched operation or a container of such operations. `condition` marks a loop's continuation test."""

    kind: str
    condition: bool
    inner: list["_Thunk"] = dataclasses.field(default_factory=list)


def compiled(lowered: Any, options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Return the compiled program and the list of its launches, or "" if XLA writes none, as for TPUs."""
    with tempfile.TemporaryDirectory() as folder:
        done = lowered.compile((options or {}) | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        return done, "".join(path.read_text(encoding="utf-8") for path in Path(folder).glob(_LISTS))


def of_round(launches: str, trips: Sequence[int]) -> Graphs | None:
    """Count the launches in one iteration of a program's top-level loop.

    Return None if there is no launch list, or if the program does not have exactly one such loop.

    Args:
        launches: the list from `compiled`.
        trips: the trip counts of the inner loops, in order.
    """
    rounds = [thunk for thunk in _read(launches) if thunk.kind == _LOOP]
    return _count(rounds[0].inner, False, iter(trips)) if len(rounds) == 1 else None


def _count(thunks: list[_Thunk], captured: bool, trips: Iterator[int]) -> Graphs:
    total = Graphs()
    for thunk in thunks:
        if thunk.kind == _LOOP:
            turns = next(trips)
            for inner in thunk.inner:  # a loop tests its condition one more time than it iterates
                once = _count([inner], captured, trips)
                total = sum([once] * (turns + inner.condition), total)
        elif thunk.inner:
            total += Graphs(launched=thunk.kind == _GRAPH) + _count(thunk.inner, thunk.kind == _GRAPH, trips)
        else:
            total += Graphs(captured=captured, outside=not captured)
    return total


def _read(launches: str) -> list[_Thunk]:
    """Parse the tree that the indentation represents. A loop's parts are indented one step deeper than the loop."""
    top = _Thunk("", False)
    around, condition = [top], False
    for match in filter(None, map(_LINE.match, launches.splitlines())):
        indent, kind, part = match.groups()
        if part:
            condition = part == "condition"
            continue
        depth = len(indent) // 4
        thunk = _Thunk(kind, condition and depth > 0)
        around = around[: depth + 1]
        around[-1].inner.append(thunk)
        around.append(thunk)
    return top.inner
