"""The cost of long caches for short requests."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns, ratio, spread
from jspec.engine import Engine, Request

SHORT, LONG = 1024, 8192


def run(subject: Subject, slots: int, width: int, new_tokens: int, repeats: int) -> None:
    """Measure both engines in turns on the same requests, and publish the results."""
    rng, vocab_size = np.random.default_rng(0), subject.target.config.vocab_size
    turn = iter(range(1_000_000))

    def requests(count: int, new: int) -> list[Request]:
        """Return requests with new random prompts, so that no prefix is in a slot."""
        prompts = rng.integers(1, vocab_size, (count, width)).tolist()
        return [Request(tuple(prompt), new, key=jax.random.key(next(turn))) for prompt in prompts]

    with contextlib.ExitStack() as stack:
        engines = {
            f"{length:,}": stack.enter_context(Engine(subject.target, subject.draft, slots=slots, max_length=length))
            for length in (SHORT, LONG)
        }
        rows: list[dict[str, Any]] = []
        for what, count, new in (
            ("one request", 1, new_tokens),
            ("first token", 1, 1),
            ("all slots", slots, new_tokens),
        ):
            calls: dict[str, Callable[[], Any]] = {
                name: lambda one=one, count=count, new=new: one.generate(requests(count, new))
                for name, one in engines.items()
            }
            times = in_turns(calls, repeats)
            rows += [_row(f"{what}, {name}", times[name], times[f"{SHORT:,}"]) for name in engines]
    publish(
        f"room-{subject.name}-s{slots}-{jax.default_backend()}",
        f"{subject.name}: {width} + {new_tokens} tokens a request, {slots} slots of {SHORT:,} or {LONG:,} tokens",
        rows,
        plots.bars("engine", "milliseconds"),
        folder=subject.folder,
    )


def _row(name: str, times: np.ndarray, short: np.ndarray) -> dict[str, Any]:
    """Return an engine's time, also relative to that of the engine with short caches."""
    return {
        "engine": name,
        "milliseconds": 1000 * spread(times).median,
        "least": 1000 * float(times.min()),
        "time / time with short caches": ratio(times, short).median,
        "least / least": float(times.min() / short.min()),
    }
