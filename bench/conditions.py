"""The conditions that a measurement depends on: machine, versions, flags, commit and load."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax

# Versions are looked up without importing the packages, because importing torch takes seconds.
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _commit() -> str:
    commit = _first_line(["git", "rev-parse", "--short", "HEAD"])
    changed = _first_line(["git", "status", "--porcelain", "--", "..", ":!results"])
    return f"{commit}+changes" if commit and changed else commit or "unknown"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _command(arguments: list[str]) -> str:
    """Return the command with ~ for the home folder, and without `--output`, which does not affect the results."""
    if "--output" in arguments:
        i = arguments.index("--output")
        arguments = arguments[:i] + arguments[i + 2 :]
    return " ".join(["python -m bench", *arguments]).replace(str(Path.home()), "~")


def conditions() -> dict[str, object]:
    """Return the conditions that a report should include, as JSON-serializable values."""
    device = jax.devices()[0]
    gpu = _first_line(
        ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    )
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "gpu": gpu,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": os.environ.get("BENCH_COMMIT") or _commit(),
        "command": _command(sys.argv[1:]),
        "date": datetime.date.today().isoformat(),
    }


def summary(here: dict[str, object]) -> str:
    """Return `conditions` as one line, for the bottom of a plot."""
    device = f"{here['processor']}, {here['cores']} cores" if here["platform"] == "cpu" else here["device"]
    return f"{device}; jax {here['jax']}; commit {here['commit']}; {here['date']}"
