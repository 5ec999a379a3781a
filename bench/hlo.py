"""A parser for compiled programs as XLA prints them: computations of instructions, and a device's launches."""

import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "token": 0, "opaque": 0}
# Operations that cost a device nothing: aliases of other arrays, and the ends of operations that started earlier.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("opt-barrier", "partition-id", "replica-id", "domain", "add-dependency"),
}
_STRUCTURE = {"while", "conditional", "call", "async-start"}
_HOST = re.compile(r"callback|HostExecute")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        op: the operation, such as "fusion" or "copy".
        shape: the shape of the result, such as "bf16[1,3072]{1,0}", or several shapes in parentheses.
        operands: the names of the operands.
        literal: the text between the parentheses, such as the value of a constant.
        rest: the attributes, which follow the parentheses.
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
        """The size of the result, including all its parts."""
        return array_bytes(self.shape)

    @property
    def scope(self) -> str:
        """The instruction's source in the traced program: named scopes and primitives."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def calls(self) -> list[str]:
        """The computations that the instruction runs. For a loop, these are the condition and the body."""
        found = re.findall(
            r"(?:calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)", self.rest
        )
        for several in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", self.rest):
            found += re.findall(r"[\w.\-]+", several)
        return found

    @property
    def body(self) -> str:
        """The computation that a loop repeats."""
        return re.search(r"body=%?([\w.\-]+)", self.rest)[1]  # pyright: ignore[reportOptionalSubscript]

    @property
    def condition(self) -> str:
        """The computation that decides whether a loop continues."""
        return re.search(r"condition=%?([\w.\-]+)", self.rest)[1]  # pyright: ignore[reportOptionalSubscript]

    @property
    def host(self) -> bool:
        """Whether the instruction waits for the host or sends data to the host."""
        return self.op in ("infeed", "outfeed", "send", "recv") or (
            self.op == "custom-call" and bool(_HOST.search(self.rest.split("metadata=")[0]))
        )


def arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return the dtype and dimensions of every array in a shape string."""
    return [
        (dtype, tuple(map(int, filter(None, sizes.split(",")))))
        for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)
    ]


def array_bytes(shape: str) -> int:
    """Return the size in bytes of all arrays in a shape string, without padding."""
    return sum(math.ceil(_dtype_bytes(dtype) * math.prod(sizes)) for dtype, sizes in arrays(shape))


def _dtype_bytes(dtype: str) -> float:
    known = _BYTES.get(dtype)
    return int(re.sub(r"\D+(\d+).*", r"\1", dtype)) / 8 if known is None else known


def _closing(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unclosed parenthesis: {text[start : start + 80]}")


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
    """A parsed compiled module.

    Attributes:
        computations: name -> instructions.
        entry: the name of the entry computation.
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
        """Return the root instruction of a computation, which is its result."""
        return next(one for one in self.computations[name].values() if one.root)

    def trips(self, loop: Instruction) -> int | None:
        """Return a loop's trip count, if XLA reports it or the loop compares a counter with a constant."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest)
        if known:
            return int(known[1])
        last = self.root(loop.condition)
        if last.op != "compare" or "direction=LT" not in last.rest:
            return None
        bound = self.computations[loop.condition][last.operands[1]]
        return int(bound.literal) if bound.op == "constant" else None

    def loops(self, name: str) -> list[Instruction]:
        """Return the loops in a computation and its callees, except nested loops."""
        found = []
        for one in self.computations[name].values():
            if one.op == "while":
                found.append(one)
            elif one.op in _STRUCTURE:
                found += [loop for called in one.calls for loop in self.loops(called)]
        return found

    def launches(self, name: str, times: int = 1) -> Iterator[tuple[Instruction, str, int]]:
        """Yield each launch of a computation: the instruction, the computation that contains it, and the launch count.

        The body of a loop of unknown length counts once. All branches of a conditional count.
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
