"""A drill's results, in lines that fit a terminal."""

import json
from pathlib import Path
from typing import Any

_ROWS = 8  # rows shown per step
_WIDTH = 130
_LEFT_OUT = {"what", "traceback", "file", "rounds", "ms_low", "ms_high", "x_low", "x_high", "over", "programs", "at"}


def text(folder: Path, drill: dict[str, Any]) -> str:
    """Return a line for each row of every step, errors and wrong results first."""
    return "\n".join(of_step(folder, entry) for entry in drill["steps"])


def of_step(folder: Path, entry: dict[str, Any]) -> str:
    """Return the lines for the step that `entry` of ``drill.json`` describes."""
    lines = [f"\n{entry['step']}: {entry['state']}, {entry.get('seconds', 0)} s"]
    rows = json.loads((folder / entry["file"]).read_text(encoding="utf-8"))["rows"]
    rows.sort(key=lambda row: not _bad(row))  # stable
    lines += [_line(row) for row in rows[:_ROWS]]
    if len(rows) > _ROWS:
        lines.append(f"  and {len(rows) - _ROWS} more rows in {entry['file']}")
    return "\n".join(lines)


def _bad(row: dict[str, Any]) -> bool:
    return "error" in row or row.get("ok") is False


def _line(row: dict[str, Any]) -> str:
    figures = (f"{name} {_short(value)}" for name, value in row.items() if _simple(name, value))
    line = f"  {'FAILED ' if _bad(row) else ''}{row['what']}: {', '.join(figures)}"
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _simple(name: str, value: Any) -> bool:
    return name not in _LEFT_OUT and not isinstance(value, list | dict)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
