"""The traffic and arithmetic of a kernel: the bytes that it reads and writes in memory, and the FLOPs of its products.

For a sliced array, only the slice counts, and for an in-place update, only the update. A TPU's on-chip memory does not
count.
"""

import math
import re

from bench.hlo import Instruction, array_bytes, arrays

Computation = dict[str, Instruction]

_SLICES = {"slice", "dynamic-slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # op -> the operand that is written into the first one
_LIBRARY = re.compile(r'custom_call_target="__cublas')
_ON_CHIP = re.compile(r"S\([1-9]\)")


def traffic(one: Instruction, here: Computation, computations: dict[str, Computation]) -> tuple[int, int]:
    """Return the bytes read and written by an instruction of the computation `here`."""
    if one.op == "all-reduce-start":
        size = _bytes(one.shape)
        return size, size
    if one.op.endswith("-start"):  # between memories: (from, to, ...), but (to, from, ...) for a copy
        moved = _parts(one.shape)[:2]
        source, target = moved[::-1] if one.op == "copy-start" else moved
        return (0 if _ON_CHIP.search(source) else array_bytes(target)), _bytes(target)
    if one.op == "fusion":
        inner = computations[one.calls[0]]
        sources, results = [i for i in inner.values() if i.op == "parameter"], _results(inner)
    else:
        inner, sources = here, [here[operand] for operand in dict.fromkeys(one.operands) if operand in here]
        results = [one]
    read = sum(_read(source, inner, None if one.op == "fusion" else one) for source in sources)
    if one.op == "custom-call":
        return read, _written_by_call(one)
    written = sum(
        0 if _ON_CHIP.search(part) else _written(result, inner)
        for part, result in zip(_parts(one.shape), results, strict=False)
    )
    return read, written


def _written_by_call(one: Instruction) -> int:
    """Return the bytes of a call's results, without library workspaces and results updated in place.

    The size of in-place updates is unknown.
    """
    parts = _parts(one.shape)
    if _LIBRARY.search(one.rest):
        return _bytes(parts[0])
    in_place = re.search(r"output_to_operand_aliasing=\{(.*?\)\})", one.rest)
    kept = set(re.findall(r"\{(\d+)\}: \(", in_place[1])) if in_place else set()
    return sum(_bytes(part) for i, part in enumerate(parts) if str(i) not in kept)


def flops(one: Instruction, here: Computation, computations: dict[str, Computation]) -> int:
    """Return the FLOPs of an instruction's products, two for each multiplication."""
    if one.op == "fusion":
        return sum(
            flops(inner, computations[called], computations)
            for called in one.calls
            for inner in computations[called].values()
        )
    if one.op not in ("dot", "convolution") and not _LIBRARY.search(one.rest.split("metadata=")[0]):
        return 0
    left, right = (arrays(here[operand].shape)[0][1] for operand in one.operands[:2])
    batched = re.search(r"lhs_batch_dims=\{([\d,]+)\}", one.rest)
    batch = math.prod(left[int(i)] for i in batched[1].split(",")) if batched else 1
    result = math.prod(arrays(one.shape)[0][1])
    # [M, K] times [K, N] gives [M, N]: K^2 is the operands' sizes over the result's, and B times that for a batch of B.
    return round(2 * result * math.sqrt(math.prod(left) * math.prod(right) / (result * batch)))


def _parts(shape: str) -> list[str]:
    """Return the arrays of a shape, with their layouts."""
    return re.findall(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?", shape)


def _bytes(part: str) -> int:
    return 0 if _ON_CHIP.search(part) else array_bytes(part)


def _results(inner: Computation) -> list[Instruction]:
    root = next(one for one in inner.values() if one.root)
    return [inner[name] for name in root.operands] if root.op == "tuple" else [root]


def _read(source: Instruction, inner: Computation, reader: Instruction | None) -> int:
    """Return the bytes of `source` that `reader` reads, or that the whole computation reads if `reader` is None."""
    whole = sum(map(_bytes, _parts(source.shape)))
    names = {source.name}
    if reader is None:  # later instructions may see it in another shape
        names |= {one.name for one in _followed(names, inner) if one.op == "bitcast"}
    total = 0
    for user in [reader] if reader else [one for one in _followed(names, inner) if one.op != "bitcast"]:
        first = bool(user.operands) and user.operands[0] in names
        if user.op in _SLICES and first:
            total += min(user.bytes, whole)
        elif not (user.op in _UPDATES and first):
            return whole
    return min(total, whole)


def _followed(names: set[str], inner: Computation) -> list[Instruction]:
    """Return the instructions that read any of `names`, in whatever shape."""
    found, names = [], set(names)
    for one in inner.values():  # operands come before their users
        if names & set(one.operands):
            found.append(one)
            if one.op == "bitcast":
                names.add(one.name)
    return found


def _written(one: Instruction, inner: Computation) -> int:
    while one.op == "bitcast":
        one = inner[one.operands[0]]
    if one.op in _UPDATES:
        return array_bytes(inner[one.operands[_UPDATES[one.op]]].shape)
    return 0 if one.op == "parameter" else one.bytes
