"""Compare the times and outputs of whole calls in this checkout and in another, such as the previous commit."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats

from bench import plots
from bench.report import publish
from bench.timing import ratio

ROOT = Path(__file__).parent.parent
NEW_TOKENS = 96
PROGRAMS = ("plain", "draft model", "lookup")
TOLERANCE = 1e-5  # the largest difference between two programs' log-probabilities in float32
NOTABLE = 0.02

# Runs in either checkout, which is the working directory and thus first on the path. It may therefore use only the
# parts of `jspec` and `bench.pairs` that both checkouts have. Each input line is the index of a call, and the reply is
# its time in seconds. The first results go into a file.
_WORKER = f"""
import json, sys, time
import jax, numpy as np, jspec
from bench import pairs
pair, batches, file = json.loads(sys.argv[1])
target, draft = pairs.pair(pair)
calls = []
for batch in batches:
    prompts = np.random.default_rng(0).integers(1, target.config.vocab_size, (batch, 32))
    request = prompts, np.full(batch, 32), jax.random.split(jax.random.key(0), batch)
    options = dict(max_new_tokens={NEW_TOKENS})
    calls += [lambda r=request, o=options: jspec.generate(target, *r, **o),
              lambda r=request, o=options: jspec.speculative_generate(target, draft, *r, num_draft_tokens=4, **o),
              lambda r=request, o=options: jspec.speculative_generate(
                  target, jspec.NGramDrafter(), *r, num_draft_tokens=jspec.UpTo(4), **o)]
outs = [call() for call in calls]
np.savez(file, **{{f"{{name}} {{i}}": np.asarray(getattr(out, name))
                  for i, out in enumerate(outs) for name in ("tokens", "lengths", "logprobs")}})
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    jax.block_until_ready(calls[int(line)]())
    print(time.perf_counter() - start, flush=True)
"""


class Worker:
    """A process that decodes on request with one checkout's jspec."""

    def __init__(self, checkout: Path, pair: str, batches: Sequence[int], results: Path):
        arguments = json.dumps([pair, list(batches), str(results)])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, arguments],
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if self._read() != "ready":
            raise RuntimeError(f"jspec in {checkout} failed to decode {pair}; see above.")
        self.results = dict(np.load(results))

    def seconds(self, call: int) -> float:
        """Run the call with this index and return its time in seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{call}\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def run(base: Path, pair: str, batches: list[int], repeats: int) -> None:
    """Publish one row per program and batch size.

    Args:
        base: the other checkout.
    """
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        try:
            for name, checkout in (("there", base.resolve()), ("here", ROOT)):
                workers.append(Worker(checkout, pair, batches, Path(folder) / f"{name}.npz"))
            labels = [f"{program}, batch {batch}" for batch in batches for program in PROGRAMS]
            readings = np.array([_turn(workers, len(labels), turn) for turn in range(repeats)])  # [turn, worker, call]
        finally:
            for worker in workers:
                worker.close()
    there, here = workers
    rows = [
        {"program": label} | compared(*readings[:, :, i].T) | same(there.results, here.results, i)
        for i, label in enumerate(labels)
    ]
    publish(
        f"against-{pair}-{jax.default_backend()}",
        f"{pair}: this checkout against {_commit(base)}, {NEW_TOKENS} new tokens",
        rows,
        plots.bars("program", "time"),
        notes=[
            f"{repeats} calls each, in turns. time: the median of this checkout's time over the other's; from and to:"
            f" quartiles; p: from Wilcoxon's signed-rank test. slower: p < 0.05, and by more than {NOTABLE:.0%}."
        ],
    )


def compared(theirs: np.ndarray, ours: np.ndarray) -> dict[str, Any]:
    """Return the time ratios within turns, and whether ours is slower by a significant and notable amount."""
    times = ratio(ours, theirs)
    chance = float(stats.wilcoxon(np.log(ours / theirs)).pvalue)
    slower = chance < 0.05 and times.median > 1 + NOTABLE
    return {"time": times.median, "from": times.low, "to": times.high, "p": chance, "slower": "yes" if slower else "no"}


def same(theirs: dict[str, np.ndarray], ours: dict[str, np.ndarray], call: int) -> dict[str, Any]:
    """Return the number of identical token sequences, and the largest log-probability difference among them."""
    names = ("tokens", "lengths", "logprobs")
    tokens, lengths, logprobs = ([side[f"{name} {call}"] for side in (theirs, ours)] for name in names)
    equal = (tokens[0] == tokens[1]).all(1) & (lengths[0] == lengths[1])
    difference = np.abs(logprobs[0] - logprobs[1])[equal].max(initial=0)
    return {"same texts": f"{equal.sum()} of {equal.size}", "log-probabilities": float(difference)}


def _turn(workers: Sequence[Worker], calls: int, turn: int) -> list[list[float]]:
    """Return the seconds that both workers take for every call. The worker that goes first alternates."""
    taken = np.zeros((2, calls))
    for call in range(calls):
        for i in (0, 1) if turn % 2 else (1, 0):
            taken[i, call] = workers[i].seconds(call)
    return taken.tolist()


def _commit(checkout: Path) -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+changes"], cwd=checkout, capture_output=True, text=True
    )
    return described.stdout.strip() or str(checkout)
