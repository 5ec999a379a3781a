"""The steps of the drill, in order of value, and how long each may take."""

import dataclasses
from pathlib import Path

# Of a drill that is given as long as the shares below add up to.
SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Step:
    """Measurements that share a process.

    Attributes:
        name: of the step and of its file.
        module: has ``run(record: Record, rehearse: bool) -> None``.
        share: seconds that it may take of a drill of `SECONDS`, beside those that earlier steps left over.
    """

    name: str
    module: str
    share: float


STEPS = (
    Step("device", "bench.gpu.device", 30.0),
    Step("correctness", "bench.gpu.correctness", 50.0),
    Step("decoding", "bench.gpu.decoding", 95.0),
    Step("rivals", "bench.gpu.rivals", 45.0),
    Step("settings", "bench.gpu.settings", 50.0),
    Step("checks", "bench.gpu.checks", 30.0),
)


def file_of(folder: Path, name: str, steps: tuple[Step, ...] = STEPS) -> Path:
    """Return where the results of the step `name` are: ``<position>-<name>.json``."""
    position = next(i for i, step in enumerate(steps, 1) if step.name == name)
    return folder / f"{position:02}-{name}.json"
