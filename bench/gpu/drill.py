"""The drill: a sequence of steps, each in a process that is killed when its time is up.

A step that fails, hangs or crashes leaves the rows that it has measured, and the next step runs. Files are replaced
atomically, so the files of finished steps are complete even if the drill is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from bench.gpu import summary
from bench.gpu.record import write
from bench.gpu.steps import STEPS, Step, choose, file_of

_ROOT = Path(__file__).parents[2]
_LEAST = 2.0  # seconds that a step gets even if earlier steps overran
_KEPT = 6000  # characters to keep from the end of a step's output


class Drill:
    """Steps that share a folder and a time limit.

    Args:
        folder: the folder for the files, created if missing.
        seconds: the time limit for all steps together.
        rehearse: whether to measure tiny models and arrays on CPU instead.
        steps: all steps, in order.
        only: the names of the steps to run; empty for all except those that run on request.
    """

    def __init__(
        self, folder: Path, seconds: float, rehearse: bool, steps: Sequence[Step] = STEPS, only: Sequence[str] = ()
    ):
        self._folder, self._rehearse, self._all = folder.resolve(), rehearse, steps
        self._steps = choose(steps, only, rehearse)
        self._scale = seconds / sum(step.share for step in self._steps)
        self._begin = time.monotonic()
        self.facts: dict[str, Any] = {"state": "running", "seconds_given": seconds, "rehearsal": rehearse}
        self.facts |= {"conditions": None, "steps": []}

    def run(self) -> None:
        """Run the steps, write their files and ``drill.json``, and print the most important results."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for step in self._steps:
            file_of(self._folder, step.name, self._all).unlink(missing_ok=True)
        due = self._begin
        for step in self._steps:
            due += step.share * self._scale
            self._play(step, max(_LEAST, due - time.monotonic()))
        self.facts["state"] = "done"
        self._write()
        print(summary.text(self._folder, self.facts), flush=True)

    def _play(self, step: Step, limit: float) -> None:
        """Run `step` for at most `limit` seconds, and record in its file how it ended."""
        begin, file = time.monotonic(), file_of(self._folder, step.name, self._all)
        entry = {"step": step.name, "file": file.name, "state": "running", "limit": round(limit, 1)}
        self.facts["steps"].append(entry)
        self._write()
        print(f"{step.name}: at most {limit:.0f} s ...", flush=True)
        with tempfile.TemporaryFile() as output:
            code = _in_process(step, file, self._rehearse, limit, output)
            results = _settle(file, step, code, _tail(output))
        errors = sum("error" in row for row in results["rows"])
        entry |= {"state": results["state"], "seconds": round(time.monotonic() - begin, 1)}
        entry |= {"rows": len(results["rows"]), "errors": errors}
        self.facts["conditions"] = self.facts["conditions"] or results.get("conditions")
        self._write()
        print(summary.of_step(self._folder, entry), flush=True)

    def _write(self) -> None:
        self.facts["seconds"] = round(time.monotonic() - self._begin, 1)
        write(self._folder / "drill.json", self.facts)


def _in_process(step: Step, file: Path, rehearse: bool, limit: float, output: IO[bytes]) -> int | None:
    """Run `step` and return its exit code, or None if it exceeded its limit. Kill all processes that it started."""
    command = [sys.executable, "-m", "bench.gpu.step", step.module, str(file), *(["--rehearse"] if rehearse else [])]
    child = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=_environment(step, rehearse),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # child processes may outlive the step and hold the GPU
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process may be stuck in the device driver
            child.wait(10)


def _environment(step: Step, rehearse: bool) -> dict[str, str]:
    """Return the environment of a step's process. Variables that are already set are kept, except the platform."""
    # Without an explicit platform, JAX falls back to the CPU if a GPU does not start.
    fixed = {"JAX_PLATFORMS": "cuda,cpu"}
    if rehearse:  # most of the time is spent on compilation
        fixed = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    programs = Path(tempfile.gettempdir(), "jspec-drill-programs")  # steps and drills share compiled programs
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(programs / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(programs / "torch"),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    return {**defaults, **step.environment, **os.environ, **fixed}


def _tail(output: IO[bytes]) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _KEPT))
    return output.read().decode("utf-8", "replace")


def _settle(file: Path, step: Step, code: int | None, output: str) -> dict[str, Any]:
    """Return the results that `step` has written. If the step could not record how it ended, record it here."""
    results: dict[str, Any] = {"module": step.module, "state": "running", "rows": []}
    if file.exists():
        results |= json.loads(file.read_text(encoding="utf-8"))
    file.with_suffix(".partial").unlink(missing_ok=True)
    if results["state"] == "running":
        how = "timed out" if code is None else f"crashed ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
        results["state"] = how
    results |= {"exit_code": code, "output": output}
    write(file, results)
    return results
