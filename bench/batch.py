"""A batch job whose workers are killed, compared with the same job in one process."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench import plots
from bench.report import RESULTS, publish
from bench.subject import held_out
from jspec.bundled import PAIR
from jspec.text import load_tokenizer

_WORKER = "PartWorker"  # in the title of every worker process
_SLOTS = 8


def run(prompts: int, new_tokens: int, workers: int, kills: int, folder: Path = RESULTS) -> None:
    """Publish how many lines a job with killed workers loses, repeats or changes, and the speed of both jobs.

    Args:
        prompts: the number of prompts.
        kills: how many times to kill a worker, evenly spread over the job.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "prompts.jsonl"
        _write(prompts, file)
        options = "-n", new_tokens, "--slots", _SLOTS, "--num-draft-tokens", 2
        alone, seconds_alone, _ = _batch(file, Path(scratch) / "alone", [], *options)
        moments = [prompts * (i + 1) // (kills + 1) for i in range(kills)]
        killed = _batch(file, Path(scratch) / "killed", moments, *options, "--workers", workers)
    lines, seconds, count = killed
    found = [json.loads(line)["prompt_index"] for line in lines]
    expected = {json.loads(line)["prompt_index"]: line for line in alone}
    row: dict[str, Any] = {
        "prompts": prompts,
        "new tokens": new_tokens,
        "workers": workers,
        "killed": count,
        "lost": len({*range(prompts)} - {*found}),
        "repeated": len(found) - len({*found}),
        "differing": sum(line != expected.get(index) for index, line in zip(found, lines, strict=True)),
        "same bytes": lines == alone,
        "prompts/s": prompts / seconds,
        "prompts/s, one process": prompts / seconds_alone,
    }
    notes = [
        f"jspec batch on {workers} workers, with {count} kills (SIGKILL), and in one process without Ray."
        " Times include starting and compiling."
    ]
    draw = plots.columns("prompts", "killed", "lost", "repeated", "differing")
    publish("batch-killed-workers", "A batch job while workers are killed", [row], draw, notes, folder)


def _write(count: int, file: Path) -> None:
    """Write prompts of 8 to 32 tokens from held-out modules."""
    tokenizer = load_tokenizer(PAIR / "target")
    rows = held_out(tokenizer, min(count, 500))["inside a module"]
    texts = (tokenizer.decode(rows[i % len(rows)][: 8 + i % 25].tolist()) for i in range(count))
    file.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts))


def _batch(file: Path, output: Path, moments: list[int], *options: object) -> tuple[list[bytes], float, int]:
    """Run `jspec batch`. Return the lines of its output, the seconds it took, and the number of killed workers.

    Args:
        moments: the numbers of completed prompts at which to kill a worker.
    """
    command = [sys.executable, "-m", "jspec", "batch", file, "--output", output, *options]
    began, count = time.perf_counter(), 0
    process = subprocess.Popen([*map(str, command)])
    while process.poll() is None:
        time.sleep(0.5)
        if count < len(moments) and _completed(output) >= moments[count]:
            for victim in list(_workers(process.pid))[:1]:
                victim.kill()
                count += 1
    if process.returncode:
        raise RuntimeError(f"jspec batch ended with status {process.returncode}.")
    seconds = time.perf_counter() - began
    return b"".join(part.read_bytes() for part in sorted(output.glob("part-*"))).splitlines(), seconds, count


def _completed(output: Path) -> int:
    """Return how many of the job's prompts are complete."""
    with contextlib.suppress(OSError, ValueError):
        return len([*output.glob("part-*")]) * json.loads((output / "job.json").read_bytes())["part_size"]
    return 0


def _workers(pid: int) -> Iterator[psutil.Process]:
    """Yield the processes of the workers of the process `pid`."""
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if _WORKER in " ".join(process.cmdline()):
                yield process
