"""The device's read bandwidth, taken from the device step's results, or measured if there are none."""

import json
from typing import Any

from bench.gpu.record import Record
from bench.roofline import probes
from bench.timing import in_turns, spread

_FILES, _WHAT, _KEY = "*device.json", "read bandwidth", "gb_per_s"


def read_bandwidth(record: Record) -> float:
    """Return the bandwidth in bytes per second, and add it to `record`."""
    source, bandwidth = "device step", _of_device_step(record)
    if bandwidth is None:
        source, bandwidth = "measured by this step", max(rates(5).values())
    record.add("bandwidth", gb_per_s=bandwidth / 1e9, source=source)
    return bandwidth


def _of_device_step(record: Record) -> float | None:
    rows: list[dict[str, Any]] = []
    for file in record.file.parent.glob(_FILES):
        rows += json.loads(file.read_text(encoding="utf-8"))["rows"]
    return next((1e9 * row[_KEY] for row in rows if row["what"] == _WHAT and _KEY in row), None)


def rates(repeats: int, megabytes: int | None = None) -> dict[str, float]:
    """Return the bytes per second of each way to read a large array of `megabytes` MB, or of the default size."""
    size, calls = probes(None if megabytes is None else megabytes * 2**20)
    times = in_turns(calls, repeats)
    return {name.removeprefix("read: "): size / spread(taken).median for name, taken in times.items()}
