"""Ctrl-C at random moments in every phase of the command: the exit status, and the time until the exit."""

import os
import pty
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench import plots
from bench.report import publish

# Phase: the command, and the terminal's output when the phase starts and when it has ended.
_GENERATE = ["generate", "def f():", "-n", "1000", "--temperature", "2"]
PHASES = {
    "load": (_GENERATE, "Importing", "Compiling"),
    "compile": (_GENERATE, "Compiling", "Decoding"),
    "decode": (_GENERATE, "Decoding", "\x1b[?25h"),
    "tune": (["tune", "--max-draft-tokens", "2"], "Measuring", "\x1b[?25h"),
}
_AFTER_COMPILING = ("decode", "tune")  # the programs of these phases are already compiled


class Terminal:
    """A command running in its own terminal."""

    def __init__(self, command: list[str], cache: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = os.environ | {
            "TERM": "xterm",
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jspec", *command], env=environment, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read until `text` appears or the output ends."""
        while text not in self.shown and self._read():
            pass

    def wait_seconds(self, seconds: float) -> None:
        """Keep reading for `seconds`, because otherwise the command would block on its terminal."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            if select.select([self._ours], [], [], left)[0] and not self._read():
                break

    def wait(self) -> int:
        """Read to the end and return the exit status."""
        while self._read():
            pass
        os.close(self._ours)
        return self.process.wait()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._ours, 65536)
        except OSError:  # on Linux this means that no writer is left
            return False
        self.shown += chunk.decode(errors="replace")
        return bool(chunk)


def run(count: int, seed: int) -> None:
    """Publish one row for each of `count` signals, which cycle through the phases."""
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as kept:
        lengths = {phase: _seconds(phase, kept) for phase in PHASES}
        for number in range(count):
            phase = list(PHASES)[number % len(PHASES)]
            while (row := _interrupted(phase, rng.uniform(0, lengths[phase]), kept)) is None:
                pass
            rows.append(row)
    good = sum(row["status"] == 130 and row["crash"] == "no" for row in rows)
    slowest = max(row["s after the signal"] for row in rows)
    publish(
        "interrupts",
        f"Ctrl-C at {count} random moments of the command",
        rows,
        plots.interrupts,
        notes=[f"{good} of {count} exits had status 130 and no crash. The slowest exit took {slowest:.3f} s."],
        seconds_of_phases=lengths,
    )


@contextmanager
def _started(phase: str, kept: str) -> Iterator[Terminal]:
    """Yield the command at the start of `phase`."""
    command, begins, _ = PHASES[phase]
    with tempfile.TemporaryDirectory() as fresh:
        terminal = Terminal(command, kept if phase in _AFTER_COMPILING else fresh)
        terminal.wait_for(begins)
        yield terminal


def _seconds(phase: str, kept: str) -> float:
    """Return how long a phase takes."""
    if phase in _AFTER_COMPILING:
        Terminal(PHASES[phase][0], kept).wait()  # compiles
    with _started(phase, kept) as terminal:
        began = time.perf_counter()
        terminal.wait_for(PHASES[phase][2])
        taken = time.perf_counter() - began
        terminal.wait()
    return taken


def _interrupted(phase: str, later: float, kept: str) -> dict[str, Any] | None:
    """Interrupt `later` seconds after `phase` starts; return the table row, or None if the phase was already over."""
    with _started(phase, kept) as terminal:
        terminal.wait_seconds(later)
        over = PHASES[phase][2] in terminal.shown
        sent = time.perf_counter()
        terminal.process.send_signal(signal.SIGINT)
        status = terminal.wait()
        taken = time.perf_counter() - sent
    if over:
        return None
    crashed = any(word in terminal.shown for word in ("Traceback", "Fatal", "terminate called", "jspec: "))
    cursor = "back" if terminal.shown.endswith("\x1b[?25h") else "gone"
    return {
        "phase": phase,
        "s into the phase": later,
        "status": status,
        "s after the signal": taken,
        "crash": "yes" if crashed else "no",
        "cursor": cursor,
    }
