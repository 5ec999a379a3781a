"""The drill's steps, in order of value, with their time limits."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Step:
    """Measurements that share a process.

    Attributes:
        name: the name of the step and of its file.
        module: a module with a function ``run(record: Record, rehearse: bool) -> None``.
        share: the step's seconds in a drill of 540 seconds, in addition to those that earlier steps left over.
        environment: the environment variables of its process.
        on_request: whether a drill runs the step only if it is named. A rehearsal runs it in any case.
    """

    name: str
    module: str
    share: float
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    on_request: bool = False


# For processes that share the device. Otherwise, JAX allocates three quarters of its memory at startup.
_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
STEPS = (
    Step("device", "bench.gpu.device", 25.0),
    Step("decoding", "bench.gpu.decoding", 185.0),
    Step("correctness", "bench.gpu.correctness", 90.0),
    Step("without-kernels", "bench.gpu.without_kernels", 40.0, {"JSPEC_KERNELS": "0"}),
    Step("rivals", "bench.gpu.rivals", 115.0, _SHARED),
    Step("settings", "bench.gpu.settings", 65.0),
    Step("checks", "bench.gpu.checks", 20.0, _SHARED),
    Step("products", "bench.gpu.products", 75.0, on_request=True),
    Step("blocks", "bench.gpu.blocks", 75.0, on_request=True),
    Step("constants", "bench.gpu.constants", 75.0, on_request=True),
)


def choose(steps: Sequence[Step], only: Sequence[str], rehearse: bool) -> list[Step]:
    """Return the steps named in `only`. If it is empty, return all, but those `on_request` only for a rehearsal."""
    if only:
        return [step for step in steps if step.name in only]
    return [step for step in steps if rehearse or not step.on_request]


def file_of(folder: Path, name: str, steps: Sequence[Step] = STEPS) -> Path:
    """Return where the results of the step `name` are written: ``<position>-<name>.json``."""
    position = next(i for i, step in enumerate(steps, 1) if step.name == name)
    return folder / f"{position:02}-{name}.json"
