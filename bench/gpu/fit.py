"""A fit of the prediction constants to a drill's rounds: python -m bench.gpu.fit DIR.

For every measured round i, `bench.compiled` gives the work w_i and the number of kernels k_i. The work is a sum over
kernels of the longer of two times: bytes over the published bandwidth, and products over the peak. The fit is

    measured_i = w_i / share + k_i * launch,

which is linear in 1 / share and launch. Least squares on the relative errors determines both, within launch >= 0 and
share <= 1. In `jspec.core.devices.Device`, they are called `bandwidth_share` and `launch`.

Rounds with int8 or int4 weights are predicted but not fitted, because the cost of their products must not become the
cost of a kernel. Every other round is also predicted by a fit to all rounds except itself, to show whether the fit
predicts anything.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear  # JAX requires scipy, too

from jspec.core.devices import DEVICES

_STEP = "decoding"
_LEAST = 4  # the minimum number of rounds, because two constants fit two rounds exactly
_KEYS = ("ms", "work_ms", "kernels", "predicted_ms", "device", "predicted_for")


@dataclasses.dataclass(frozen=True)
class Round:
    """A measured round: seconds, seconds of work at published rates, kernels, and seconds predicted before the fit."""

    name: str
    seconds: float
    work: float
    kernels: int
    predicted: float

    @property
    def is_quantized(self) -> bool:
        """Whether any weights are quantised."""
        return _is_quantized(self.name)


def _is_quantized(name: str) -> bool:
    return "int8" in name or "int4" in name


@dataclasses.dataclass(frozen=True)
class Fit:
    """The fitted constants: seconds per kernel, and the share of the published bandwidth that kernels reach."""

    launch: float
    bandwidth_share: float

    def seconds(self, round_: Round) -> float:
        """Return the predicted seconds of a round."""
        return round_.work / self.bandwidth_share + round_.kernels * self.launch


def rounds(folder: Path) -> tuple[str, list[Round]]:
    """Return the device, and the batch-1 rounds that the decoding step measured in `folder`.

    Raises:
        ValueError: there are too few rounds without quantised weights, or the device has no predictions.
    """
    rows = [
        row
        for file in sorted(folder.glob(f"*{_STEP}.json"))
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]
        if all(key in row for key in _KEYS) and row.get("batch", 1) == 1
    ]
    usable = sum(not _is_quantized(row["what"]) for row in rows)
    if usable < _LEAST:
        raise ValueError(
            f"{folder} has {usable} measured rounds of the drill's {_STEP} step, but a fit needs {_LEAST};"
            " run `python -m bench gpu` and pass the folder it wrote."
        )
    devices = {(row["device"], row["predicted_for"]) for row in rows}
    if len(devices) > 1 or any(kind not in names_of(title) for kind, title in devices):
        raise ValueError(
            f"{folder} has rounds measured on one device and predicted for another, {sorted(devices)}; "
            "run the drill on a device of jspec.core.devices.DEVICES."
        )
    found = [
        Round(row["what"], row["ms"] / 1e3, row["work_ms"] / 1e3, row["kernels"], row["predicted_ms"] / 1e3)
        for row in rows
    ]
    return devices.pop()[1], found


def names_of(title: str) -> tuple[str, ...]:
    """Return the names that JAX may use for the device with this title."""
    return next(((title, *device.kinds) for device in DEVICES.values() if device.title == title), (title,))


def fit(measured: Sequence[Round]) -> Fit:
    """Return the least-squares solution. A constant that would leave its range is set to the end of the range."""
    taken = np.array([one.seconds for one in measured])
    terms = np.array([[one.work, one.kernels] for one in measured]) / taken[:, None]
    # Scale the columns to similar magnitudes: a kernel takes a millionth of a second.
    scale = np.array([1.0, 1e-6])
    solution = lsq_linear(terms * scale, np.ones(len(terms)), bounds=([1, 0], np.inf), method="bvls").x * scale
    return Fit(launch=float(solution[1]), bandwidth_share=float(1 / solution[0]))


def report(folder: Path) -> str:
    """Return a report of a drill's fit: one line per round, and the constants to write into `jspec.core.devices`."""
    title, measured = rounds(folder)
    fitted = [one for one in measured if not one.is_quantized]
    found = fit(fitted)
    lines = [f"{'round':<32}{'measured':>10}{'before':>9}{'after':>9}{'without':>9}   predicted over measured"]
    worst = 0.0
    for one in measured:
        without = fit([other for other in fitted if other is not one]).seconds(one) / one.seconds
        before, after = one.predicted / one.seconds, found.seconds(one) / one.seconds
        lines.append(f"{one.name:<32}{one.seconds * 1e3:>7.3f} ms{before:>9.3f}{after:>9.3f}{without:>9.3f}")
        worst = max(worst, abs(without - 1))
    constants = f"launch={found.launch:.3g}, bandwidth_share={found.bandwidth_share:.3g}"
    lines.append(f"Predicted by a fit to all other rounds, the worst round is {100 * worst:.1f} % off.")
    lines.append(f"In jspec/core/devices.py, {title}: {constants}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> Any:
    """Print the report for the folder named in `arguments`."""
    if len(arguments) != 1:
        return "usage: python -m bench.gpu.fit DIR"
    try:
        print(report(Path(arguments[0])))
    except ValueError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
