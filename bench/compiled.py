"""The program as a device would run it: kernels, bytes, copies, memory and predicted time, part by part.

XLA compiles the program for a device that is not present. Times are not measured, but predicted from the constants in
`jspec.core.devices`.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jspec
from bench import abstract, devices, graphs, plots
from bench.hlo import Instruction, Module, array_bytes
from bench.report import publish
from bench.traffic import flops, traffic
from jspec.core.devices import Device
from jspec.planning.block_costs import BlockWeights
from jspec.planning.memory import Weights, slots_of

PARTS = ("prefill", "draft", "verify", "accept", "commit")
DRAFT_STEP = "draft step"  # in the drafting loop; the first pass is outside the loop
LARGE = 1e6  # bytes; kernels that write more are reported


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that a device launches.

    Attributes:
        part: one of `PARTS`, "draft step" within the drafting loop, or "" if XLA does not say.
        times: the number of launches in one round or one prefill.
        read, written: the bytes per launch.
        flops: the floating-point operations of its products, per launch.
    """

    name: str
    op: str
    shape: str
    part: str
    times: int
    read: int
    written: int
    flops: int

    @property
    def moves(self) -> bool:
        """Whether the kernel writes at least `LARGE` bytes and computes no product.

        Such a kernel is a copy, a conversion, or a product that XLA decomposed.
        """
        return self.written >= LARGE and not self.flops

    def seconds(self, device: Device) -> float:
        """Return the predicted time of all its launches."""
        work = max((self.read + self.written) / device.read_bandwidth, self.flops / device.flops)
        return self.times * (work + device.launch)


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed compiled program.

    Attributes:
        kernels: the kernels of one round, in order.
        prefill: the kernels before the first round.
        loops: the source scopes of the loops within a round, except the drafting loop.
        waits: the number of loops of unknown length in a round. Each makes a GPU wait for the host at every iteration.
        conditionals: the number of conditionals in a round. Conditionals make a GPU wait, too.
        host: the number of transfers to or from the host in a round.
        arguments, temporary: sizes in bytes. The temporaries include the caches.
        on_chip: the bytes of temporaries that stay in a TPU's on-chip memory between rounds.
        graphs: how a GPU's host starts a round; None if XLA does not say.
    """

    kernels: list[Kernel]
    prefill: list[Kernel]
    loops: list[str]
    waits: int
    conditionals: int
    host: int
    arguments: int
    temporary: int
    on_chip: int
    graphs: graphs.Graphs | None

    def count(self, part: str | None = None) -> int:
        """Return the number of launches in one round, or in one of its parts."""
        return sum(kernel.times for kernel in self.kernels if part in (None, kernel.part))


def compile_and_read(device: Device, target: Any, draft: Any, setting: abstract.Setting, count: int = 1) -> Program:
    """Compile the program for `count` devices of one kind, and parse it."""
    return read(*graphs.compiled(abstract.trace(target, draft, setting, devices.topology(device, count)).lower()))


def read(compiled: Any, launches: str = "") -> Program:
    """Parse a program that JAX has compiled. Its top-level loop runs the rounds, and a loop inside it may draft.

    Args:
        launches: the launch list from `bench.graphs.compiled`.
    """
    module = Module(compiled.as_text())
    rounds = [loop for loop in module.loops(module.entry) if loop.scope.endswith("jit(decode_program)/while")]
    if len(rounds) != 1:
        raise ValueError(f"Expected one loop over rounds, found {len(rounds)}; this program does not decode.")
    inside = [found for name in rounds[0].calls for found in module.launches(name)]
    loops = module.loops(rounds[0].body)
    places = {place for _, place, _ in inside}
    drafting = [loop for loop in loops if loop.scope.endswith("/draft/while")]
    steps = {place for loop in drafting for name in loop.calls for _, place, _ in module.launches(name)}
    others = [loop for loop in loops if loop not in drafting]
    others += [inner for loop in drafting for inner in module.loops(loop.body)]
    memory = compiled.memory_analysis()
    return Program(
        _kernels(module, inside, steps),
        _kernels(module, [found for found in module.launches(module.entry) if found[1] not in places], set()),
        [loop.scope for loop in others],
        sum(module.trips(loop) is None for loop in (*others, *drafting)),
        sum(one.op == "conditional" for place in places for one in module.computations[place].values()),
        sum(one.host for one, _, _ in inside),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        sum(array_bytes(part) for part in re.findall(r"\w+\[[\d,]*\]\{[^}]*S\(1\)\}", rounds[0].shape)),
        graphs.of_round(launches, _turns(module, loops)),
    )


def _turns(module: Module, loops: list[Instruction]) -> list[int]:
    """Return the trip counts of the loops and of those nested in them, in order; 1 if a count is unknown."""
    return [turns for loop in loops for turns in (module.trips(loop) or 1, *_turns(module, module.loops(loop.body)))]


def _kernels(module: Module, launches: list[tuple[Instruction, str, int]], steps: set[str]) -> list[Kernel]:
    """Return the kernels in execution order. A kernel that XLA does not name belongs to the part that follows it."""
    found, part = [], ""
    for one, place, times in reversed(launches):
        part = next((part for part in PARTS if f"/{part}/" in one.scope), part)
        where = DRAFT_STEP if place in steps else part
        around = module.computations[place], module.computations
        found.append(Kernel(one.name, one.op, one.shape, where, times, *traffic(one, *around), flops(one, *around)))
    return found[::-1]


def table(program: Program, device: Device) -> list[dict[str, Any]]:
    """Return one row per part of a round, one for the whole round, and one for the prefill."""
    parts: dict[str, list[Kernel]] = {}
    for kernel in program.kernels:
        parts.setdefault(kernel.part, []).append(kernel)
    rows = parts | {"a round": program.kernels, "prefill": program.prefill}
    return [_row(name, kernels, device) for name, kernels in rows.items()]


def _row(name: str, kernels: list[Kernel], device: Device) -> dict[str, Any]:
    read, written = (sum(kernel.times * getattr(kernel, key) for kernel in kernels) for key in ("read", "written"))
    launched = sum(kernel.times for kernel in kernels)
    return {
        "part": name,
        "kernels": launched,
        "MB read": read / 1e6,
        "MB written": written / 1e6,
        "copies": sum(kernel.times for kernel in kernels if kernel.op == "copy"),
        "large moves": sum(kernel.times for kernel in kernels if kernel.moves),
        "ms of bytes": 1e3 * (read + written) / device.read_bandwidth,
        "ms of launches": 1e3 * launched * device.launch,
        "ms predicted": 1e3 * sum(kernel.seconds(device) for kernel in kernels),
    }


def by_layer(device: Device, targets: tuple, drafts: tuple, setting: abstract.Setting) -> dict[str, float]:
    """Count the kernels that one more layer adds to plain decoding, verification, and the first and later draft steps.

    Args:
        targets, drafts: each a two-layer model and the same model with four layers.
    """

    def counts(target: Any, draft: Any) -> dict[str, int]:
        program = compile_and_read(device, target, draft, setting if draft else setting.plain())
        return {part: program.count(part) for part in (*PARTS, DRAFT_STEP)}

    few, more = (counts(target, None) for target in targets)
    found = {"plain": more["verify"] - few["verify"]}
    if setting.draft_length:
        few, steps = counts(targets[0], drafts[0]), max(1, setting.draft_length - 1)
        of_target, of_draft = counts(targets[1], drafts[0]), counts(targets[0], drafts[1])
        found |= {
            "verify": of_target["verify"] - few["verify"],
            "first draft step": of_draft["draft"] - few["draft"],
            "draft step": (of_draft[DRAFT_STEP] - few[DRAFT_STEP]) / steps,
        }
    return {name: count / 2 for name, count in found.items()}


def run(name: str, pair: str, setting: abstract.Setting, count: int, folder: Path) -> None:
    """Publish the parts of plain decoding and of a round, for `count` devices of the kind `name`.

    Raises:
        ValueError: the weights and caches do not fit.
    """
    device = devices.DEVICES[name]
    models = abstract.pair(pair, device.dtype)
    check_fits(device, models, setting, count)
    plain, round_ = (compile_and_read(device, *models, one, count) for one in (setting.plain(), setting))
    rows = [
        {"program": title} | row
        for title, program in (("plain", plain), (f"K = {setting.draft_length}", round_))
        for row in table(program, device)
    ]
    shallow = [abstract.pair(pair, device.dtype, num_hidden_layers=n) for n in (2, 4)]
    layers = by_layer(device, *zip(*shallow, strict=True), setting) if device.platform == "cuda" else {}
    folder.mkdir(parents=True, exist_ok=True)
    publish(
        f"compiled-{name}-{pair}-k{setting.draft_length}-b{setting.batch}" + (f"-x{count}" if count > 1 else ""),
        f"{pair} compiled for {count} x {device.title}: batch {setting.batch}, {device.dtype}, {setting.width} tokens "
        f"of prompt and {setting.new_tokens} new ones",
        rows,
        plots.bars("part", "ms predicted"),
        notes=[
            f"Predicted, not measured: the larger of bytes over {device.read_bandwidth / 1e9:.0f} GB/s and products "
            f"over {device.flops / 1e12:.0f} TFLOP/s, and {device.launch * 1e6:g} us for every kernel.",
            "large moves: kernels that write at least 1 MB and compute no product.",
            *(_facts(title, program) for title, program in (("plain", plain), ("round", round_))),
            *([f"Kernels per layer: {', '.join(f'{part} {n:g}' for part, n in layers.items())}."] if layers else []),
        ],
        folder=folder,
        kernels_a_layer=layers,
        programs={"plain": _summary(plain), "round": _summary(round_)},
    )


def check_fits(
    device: Device, models: Sequence[jspec.Llama | jspec.BlockDrafter], setting: abstract.Setting, count: int
) -> None:
    """Raise ValueError if the weights and caches alone exceed the memory of `count` devices."""
    slots, memory = slots_of(setting.width + setting.new_tokens, 0), device.memory / 1e9
    held = [_weights(one) for one in models]
    weights = sum(one.bytes for one in held) / 1e9
    caches = sum(one.cache_bytes(setting.batch, slots) for one in held) / 1e9
    if weights + caches > count * memory:
        raise ValueError(
            f"{weights:.1f} GB of weights and {caches:.1f} GB of caches do not fit on {count} x "
            f"{device.title} of {memory:.1f} GB; pass --devices, or use a smaller pair or batch."
        )


def _weights(model: jspec.Llama | jspec.BlockDrafter) -> Weights | BlockWeights:
    if isinstance(model, jspec.BlockDrafter):
        return BlockWeights(model.block.config, model.block.dtype.itemsize)
    return Weights(model.config, model.dtype.itemsize, model.quantized)


def _facts(title: str, program: Program) -> str:
    return (
        f"{title}: {len(program.loops)} loops other than the drafting loop, {program.waits} of unknown length, "
        f"{program.conditionals} conditionals, {program.host} host transfers; {program.arguments / 1e6:.0f} MB of "
        f"arguments, {program.temporary / 1e6:.0f} MB of temporaries including caches, "
        f"{program.on_chip / 1e6:.0f} MB of them on the chip" + _starts(program.graphs) + "."
    )


def _starts(found: graphs.Graphs | None) -> str:
    if found is None:
        return ""
    return (
        f"; the host starts {found.launched} graphs, which hold {found.captured} kernels and copies, and "
        f"{found.outside} kernels and copies outside graphs"
    )


def _summary(program: Program) -> dict[str, Any]:
    names = ("loops", "waits", "conditionals", "host", "arguments", "temporary", "on_chip")
    moved = [f"{one.times} x {one.shape} ({one.part})" for one in program.kernels if one.moves]
    captured = {} if program.graphs is None else {"graphs": dataclasses.asdict(program.graphs)}
    return {name: getattr(program, name) for name in names} | captured | {"large moves": moved}
