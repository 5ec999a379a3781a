"""The waiting times of concurrent requests: for a first token with a draft, and during the prefill of a long prompt."""

import threading
import time
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import spread
from jspec.engine import Engine, Request

STREAMS = 3
NEW = 400  # tokens per stream, enough to last during the prefill


class Stream:
    """One request and the times at which its tokens arrived."""

    def __init__(self, engine: Engine, request: Request):
        self.times, self.begun, self.ended = [], time.perf_counter(), threading.Event()
        self.active_request = engine.submit(request, self._more)

    def _more(self, result: Any) -> None:
        self.times += [time.perf_counter()] * (len(result.tokens) - len(self.times))
        if result.finish_reason:
            self.ended.set()

    def first(self) -> float:
        """Wait for the first token and return the seconds until its arrival."""
        while not self.times:
            time.sleep(1e-4)
        return self.times[0] - self.begun

    def each(self, since: float, until: float) -> list[float]:
        """Return the seconds per token in the interval. Tokens that arrive together share their gap equally."""
        moments, counts = np.unique([moment for moment in self.times if since <= moment <= until], return_counts=True)
        return [share for gap, n in zip(np.diff(moments), counts[1:], strict=True) for share in [gap / n] * n]


def run(subject: Subject, long: int, repeats: int) -> None:
    """Measure with and without a draft, in turns, and publish the results."""
    (row,), _, _ = subject.request(1, 96)
    prompt, length = tuple(row.tolist()), subject.target.config.max_position_embeddings
    long = min(long, length - 16)
    text = (prompt * (long // len(prompt) + 1))[:long]
    options: dict[str, Any] = {"slots": STREAMS + 1, "max_length": length}
    with Engine(subject.target, **options) as plain, Engine(subject.target, subject.draft, **options) as drafted:
        engines, found = {"plain": plain, "with the draft": drafted}, {}
        for turn in range(repeats + 1):
            for name, engine in engines.items():
                figures = _figures(engine, prompt, text, turn)
                if turn:
                    found.setdefault(name, []).append(figures)
    rows = [
        {"engine": name} | {what: spread([one[what] for one in figures]).median for what in figures[0]}
        for name, figures in found.items()
    ]
    first = [spread([of["first token, ms"] for of in found[name]]).median for name in engines]
    publish(
        f"waits-{subject.name}-{jax.default_backend()}",
        f"{subject.name}: waits of concurrent requests, {STREAMS} streams and a prompt of {long} tokens",
        rows,
        plots.bars("engine", "long prompt: first token / alone"),
        notes=[
            f"The first token after {len(prompt)} takes {first[1] / first[0]:.3f} times as long with the draft as "
            f"without. For every slot: {STREAMS + 1} answers to the long prompt, requested at once."
        ],
        folder=subject.folder,
    )


def _figures(engine: Engine, prompt: tuple[int, ...], text: tuple[int, ...], turn: int) -> dict[str, float]:
    def request(tokens: tuple[int, ...], count: int, salt: str) -> Request:
        return Request(tokens, count, jspec.SamplingParams(), salt=f"{salt} {turn}")  # no prefix is cached

    def alone(tokens: tuple[int, ...], salt: str) -> float:
        stream = Stream(engine, request(tokens, 1, salt))
        stream.ended.wait()
        return stream.first()

    first, long_alone = alone(prompt, "first"), alone(text, "alone")
    every = [Stream(engine, request(text, 1, "every slot")) for _ in range(STREAMS + 1)]
    together = max(stream.first() for stream in every)
    count = min(NEW, engine.device.sizes.length - len(prompt))
    streams = [Stream(engine, request(prompt, count, f"stream {i}")) for i in range(STREAMS)]
    quiet = max(stream.begun + stream.first() for stream in streams)
    time.sleep(max(0.5, long_alone))
    asked = Stream(engine, request(text, 1, "long"))
    beside = asked.first()
    before = [share for stream in streams for share in stream.each(quiet, asked.begun)]
    during = [share for stream in streams for share in stream.each(asked.begun, asked.begun + beside)]
    for stream in streams:
        engine.cancel(stream.active_request)
        stream.ended.wait()
    p99 = [float(np.percentile(shares, 99)) * 1e3 if shares else float("nan") for shares in (before, during)]
    return {
        "first token, ms": first * 1e3,
        "p99 time per token, ms": p99[0],
        "... during the long prefill": p99[1],
        "times": p99[1] / p99[0],
        "long prompt: first token, ms": beside * 1e3,
        "long prompt: first token / alone": beside / long_alone,
        "long prompt for every slot: first token / alone": together / long_alone,
    }
