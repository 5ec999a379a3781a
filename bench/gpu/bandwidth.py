"""The read bandwidth that shares are taken of: as the device step found it, or measured where that has not run."""

import json
from typing import Any

from bench.gpu.record import Record
from bench.roofline import probes
from bench.timing import in_turns, spread

_FILES, _WHAT, _KEY = "*device.json", "read bandwidth", "gb_per_s"


def read_bandwidth(record: Record) -> float:
    """Return bytes a second, and add them to `record`."""
    source, bandwidth = "device step", _of_device_step(record)
    if bandwidth is None:
        source, bandwidth = "measured by this step", _measured()
    record.add("bandwidth", gb_per_s=bandwidth / 1e9, source=source)
    return bandwidth


def _of_device_step(record: Record) -> float | None:
    rows: list[dict[str, Any]] = []
    for file in record.file.parent.glob(_FILES):
        rows += json.loads(file.read_text(encoding="utf-8"))["rows"]
    return next((1e9 * row[_KEY] for row in rows if row["what"] == _WHAT and _KEY in row), None)


def _measured() -> float:
    size, calls = probes()
    times = in_turns(calls, 5)
    return max(size / spread(taken).median for taken in times.values())
