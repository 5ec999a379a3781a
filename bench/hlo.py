"""Compiled programs as XLA prints them: computations of instructions, and what a device launches, how often."""

import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0, "opaque": 0}
# What costs a device nothing: names for other arrays, and the ends of what has begun before.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
         "replica-id", "domain", "add-dependency"}  # fmt: skip
_STRUCTURE = {"while", "conditional", "call", "async-start"}
_HOST = re.compile(r"callback|HostExecute")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        op: as "fusion" or "copy".
        shape: as "bf16[1,3072]{1,0}", or several in parentheses.
        operands: names.
        literal: what is between the parentheses, as the number of a constant.
        rest: the attributes, behind them.
    """

    name: str
    op: str
    shape: str
    operands: tuple[str, ...]
    literal: str
    rest: str
    root: bool

    @property
    def bytes(self) -> int:
        """Of the result, all parts of it."""
        return array_bytes(self.shape)

    @property
    def scope(self) -> str:
        """Where the program comes from: named scopes and primitives."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def calls(self) -> list[str]:
        """The computations that it runs; of a loop condition and body."""
        found = re.findall(
            r"(?:calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)", self.rest
        )
        for several in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", self.rest):
            found += re.findall(r"[\w.\-]+", several)
        return found

    @property
    def body(self) -> str:
        """Of a loop: the computation that it repeats."""
        return re.search(r"body=%?([\w.\-]+)", self.rest)[1]  # pyright: ignore[reportOptionalSubscript]

    @property
    def condition(self) -> str:
        """Of a loop: the computation that says whether it goes on."""
        return re.search(r"condition=%?([\w.\-]+)", self.rest)[1]  # pyright: ignore[reportOptionalSubscript]

    @property
    def host(self) -> bool:
        """Whether it waits for the host or sends it something."""
        return self.op in ("infeed", "outfeed", "send", "recv") or (
            self.op == "custom-call" and bool(_HOST.search(self.rest.split("metadata=")[0]))
        )


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and sizes of every array in the text of a shape."""
    return [(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in
            re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)]  # fmt: skip


def array_bytes(shape: str) -> int:
    """Of all arrays in the text of a shape, without padding."""
    return sum(math.ceil(_dtype_bytes(dtype) * math.prod(sizes)) for dtype, sizes in arrays(shape))


def _dtype_bytes(dtype: str) -> float:
    known = _BYTES.get(dtype)
    return int(re.sub(r"\D+(\d+).*", r"\1", dtype)) / 8 if known is None else known


def _closing(text: str, start: int) -> int:
    """The index behind the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"a parenthesis that does not close: {text[start : start + 80]}")


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    begin = head.end()
    end = _closing(line, begin) if line[begin] == "(" else line.index(" ", begin)
    op = re.match(r"\s*([\w\-]+)\(", line[end:])
    if op is None:
        return None
    opening = end + op.end() - 1
    closing = _closing(line, opening)
    operands = tuple(re.findall(r"%([\w.\-]+)", line[opening:closing]))
    literal = line[opening + 1 : closing - 1]
    return Instruction(head[2], op[1], line[begin:end], operands, literal, line[closing:], bool(head[1]))


class Module:
    """The text of a compiled module, read.

    Attributes:
        computations: name -> instructions.
        entry: the name of the one that is run.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            header = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$|(ENTRY )?%?([\w.\-]+) \(.*-> .*\{", line)
            if header and " = " not in line.split("(")[0]:
                name = header[2] or header[4]
                current = self.computations.setdefault(name, {})
                if header[1] or header[3]:
                    self.entry = name
            elif found := _instruction(line):
                current[found.name] = found

    def root(self, name: str) -> Instruction:
        """The result of a computation."""
        return next(one for one in self.computations[name].values() if one.root)

    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs, where XLA says so or a counter is compared with a constant."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
        if known:
            return int(known[1])
        last = self.root(loop.condition)
        if last.op != "compare" or "direction=LT" not in last.rest:
            return None
        bound = self.computations[loop.condition][last.operands[1]]
        return int(bound.literal) if bound.op == "constant" else None

    def loops(self, name: str) -> list[Instruction]:
        """The loops in a computation and in what it calls, without those inside of loops."""
        found = []
        for one in self.computations[name].values():
            if one.op == "while":
                found.append(one)
            elif one.op in _STRUCTURE:
                found += [loop for called in one.calls for loop in self.loops(called)]
        return found

    def launches(self, name: str, times: int = 1) -> Iterator[tuple[Instruction, str, int]]:
        """What a computation launches: instruction, the computation it stands in, how often.

        Of a loop whose length is unknown the body counts once; of several branches all do.
        """
        for one in self.computations[name].values():
            if one.op == "while":
                trips = self.trips(one) or 1
                yield from self.launches(one.condition, times * (trips + 1))
                yield from self.launches(one.body, times * trips)
            elif one.op in _STRUCTURE:
                for called in one.calls:
                    yield from self.launches(called, times)
            elif one.op not in _FREE and not one.op.endswith(("-done", "-update")):
                yield one, name, times
