"""The constants of the predictions, fitted to a drill's rounds: python -m bench.gpu.fit DIR.

For every measured round i, `bench.compiled` gives work w_i, the sum over its kernels of the longer of bytes over the
published bandwidth and products over the peak, and k_i, its kernels. The fit is

    measured_i = w_i / share + k_i * launch,

which is linear in 1 / share and launch. They are found by least squares of the relative errors, within
launch >= 0 and share <= 1. The two are what `jspec.devices.Device` calls `bandwidth_share` and `launch`.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear  # JAX needs scipy, too

from jspec.devices import DEVICES

_STEP = "decoding"
_KEYS = ("ms", "work_ms", "kernels", "predicted_ms", "device", "predicted_for")


@dataclasses.dataclass(frozen=True)
class Round:
    """A measured round: seconds, seconds of work as published, kernels, and seconds as predicted before the fit."""

    name: str
    seconds: float
    work: float
    kernels: int
    predicted: float


@dataclasses.dataclass(frozen=True)
class Fit:
    """What fits best: seconds a kernel, and the part of the published bandwidth that is reached."""

    launch: float
    bandwidth_share: float

    def seconds(self, round_: Round) -> float:
        """Return what this predicts."""
        return round_.work / self.bandwidth_share + round_.kernels * self.launch


def rounds(folder: Path) -> tuple[str, list[Round]]:
    """Return the device, and the rounds of batch 1 that the decoding step in `folder` has measured.

    Raises:
        ValueError: it has measured none, or fewer than there are constants; or on a device without predictions.
    """
    rows = [row for file in sorted(folder.glob(f"*{_STEP}.json"))
            for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
            if all(key in row for key in _KEYS) and row.get("batch", 1) == 1]  # fmt: skip
    if len(rows) < 2:
        raise ValueError(f"{folder} has {len(rows)} measured rounds of the drill's {_STEP} step, and two constants need"
                         " two or more; run `python -m bench gpu` and pass the folder it wrote.")  # fmt: skip
    devices = {(row["device"], row["predicted_for"]) for row in rows}
    if len(devices) > 1 or any(kind not in names_of(title) for kind, title in devices):
        raise ValueError(f"{folder} has rounds measured on one device and predicted for another, {sorted(devices)}; "
                         "run the drill on a device of jspec.devices.DEVICES.")  # fmt: skip
    found = [Round(row["what"], row["ms"] / 1e3, row["work_ms"] / 1e3, row["kernels"], row["predicted_ms"] / 1e3)
             for row in rows]  # fmt: skip
    return devices.pop()[1], found


def names_of(title: str) -> tuple[str, ...]:
    """Return what JAX may call the device of that title."""
    return next(((title, *device.kinds) for device in DEVICES.values() if device.title == title), (title,))


def fit(measured: Sequence[Round]) -> Fit:
    """Return the least-squares solution; a constant that would leave its range stays at the end of it."""
    taken = np.array([one.seconds for one in measured])
    terms = np.array([[one.work, one.kernels] for one in measured]) / taken[:, None]
    # Columns of one size: a kernel takes a millionth of a second.
    scale = np.array([1.0, 1e-6])
    solution = lsq_linear(terms * scale, np.ones(len(terms)), bounds=([1, 0], np.inf), method="bvls").x * scale
    return Fit(launch=float(solution[1]), bandwidth_share=float(1 / solution[0]))


def report(folder: Path) -> str:
    """Return the fit of a drill's folder: a line a round, and what to write into `jspec.devices`."""
    title, measured = rounds(folder)
    found = fit(measured)
    lines = [f"{'round':<32}{'measured':>10}{'before':>9}{'after':>9}   predicted over measured"]
    for one in measured:
        before, after = one.predicted / one.seconds, found.seconds(one) / one.seconds
        lines.append(f"{one.name:<32}{one.seconds * 1e3:>7.3f} ms{before:>9.3f}{after:>9.3f}")
    worst = max(abs(found.seconds(one) / one.seconds - 1) for one in measured)
    return "\n".join([
        *lines,
        f"After the fit the largest error is {100 * worst:.1f} %.",
        f"In jspec/devices.py, {title}: launch={found.launch:.3g}, bandwidth_share={found.bandwidth_share:.3g}",
    ])  # fmt: skip


def main(arguments: Sequence[str]) -> Any:
    """Print the report of the folder that is named."""
    if len(arguments) != 1:
        return "usage: python -m bench.gpu.fit DIR"
    try:
        print(report(Path(arguments[0])))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
