"""An engine's tokens per second with its own choice of draft length, compared with fixed lengths and one program."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns, ratio, spread
from jspec.engine import Engine, Request, Result

LENGTHS = (1, 2, 4, 8)
TOGETHER = 4  # K for the single program and for the engine that it is compared with


def run(subject: Subject, slots: int, new_tokens: int, width: int, temperature: float, repeats: int) -> None:
    """Measure all engines in turns with 1, 2, ... concurrent requests, and with four times as many as there are slots.

    At each concurrency, a new request starts as soon as one ends. These requests generate between half of `new_tokens`
    and all of it, because plain requests of equal length would always end, and be prefilled, together.
    """
    tokens, lengths, keys = subject.request(slots, width)
    prompts = [tuple(row[:size].tolist()) for row, size in zip(tokens, lengths, strict=True)]
    sampling = jspec.SamplingParams(temperature=temperature)
    requests = [Request(prompt, new_tokens, sampling) for prompt in prompts]
    sizes = np.random.default_rng(0).integers(-(-new_tokens // 2), new_tokens, 16 * slots, endpoint=True).tolist()
    varied = [dataclasses.replace(requests[i % slots], max_new_tokens=size) for i, size in enumerate(sizes)]
    loads = {n: varied[: slots * n] for n in (1, 2, 4, 8, 16) if n <= slots}
    loads[4 * slots] = requests * 4
    options: dict[str, Any] = {"slots": slots, "max_length": int(lengths.max()) + new_tokens, "max_waiting": 8 * slots}
    with contextlib.ExitStack() as stack:

        def engine(draft: Any, **how: Any) -> Engine:
            return stack.enter_context(Engine(subject.target, draft, **options, **how))

        engines = {"plain": engine(None)}
        engines |= {f"K = {k}": engine(subject.draft, num_draft_tokens=k) for k in LENGTHS}
        engines["auto"] = engine(subject.draft)
        # Calls that are compared with each other are adjacent.
        calls = {(name, n): _under_way(one, n, load) for n, load in loads.items() for name, one in engines.items()}
        batch = (tokens, lengths, keys)
        how: dict[str, Any] = {"max_new_tokens": new_tokens, "sampling": sampling}
        calls["one program", "plain"] = lambda: [jspec.generate(subject.target, *batch, **how).tokens for _ in range(4)]
        calls["one program", "K = 4"] = lambda: [
            jspec.speculative_generate(subject.target, subject.draft, *batch, num_draft_tokens=TOGETHER, **how).tokens
            for _ in range(4)
        ]
        times = in_turns(calls, repeats)
    rows = [_row(n, sum(one.max_new_tokens for one in load), times, tuple(engines)) for n, load in loads.items()]
    saturated = {name: ratio(times["one program", name], times[name, 4 * slots]) for name in ("plain", "K = 4")}
    publish(
        f"engine-{subject.name}-s{slots}-t{temperature:g}-{jax.default_backend()}",
        f"{subject.name}: tokens per second of an engine with {slots} slots, by requests, temperature {temperature:g}",
        rows,
        plots.engine,
        notes=[
            f"Speed of the engine with {4 * slots} requests over that of one program, which decodes {slots} at a time: "
            + ", ".join(
                f"{share.median:.3f} ({share.low:.3f} to {share.high:.3f}), {name}" for name, share in saturated.items()
            )
            + "."
        ],
        folder=subject.folder,
        saturated=saturated,
    )


def _under_way(engine: Engine, count: int, requests: list[Request]) -> Callable[[], Any]:
    """Return a call that runs all `requests`, `count` at a time."""

    def call() -> Any:
        free = threading.Semaphore(count)

        def listen(result: Result) -> None:
            if result.finish_reason:
                free.release()

        active_requests = []
        for request in requests:
            free.acquire()
            active_requests.append(engine.submit(request, listen))
        for _ in range(count):
            free.acquire()
        written = np.array([len(active.result.tokens) for active in active_requests])
        assert np.array_equal(written, [request.max_new_tokens for request in requests]), "a request has failed"
        return written

    return call


def _row(n: int, tokens: int, times: dict[Any, np.ndarray], names: tuple[str, ...]) -> dict[str, Any]:
    """Return median speeds, and the ratios of "auto" to the best fixed length and to plain decoding, turn by turn."""
    speeds = {name: spread(tokens / times[name, n]).median for name in names}
    best = max((name for name in names if name != "auto"), key=speeds.__getitem__)
    of = {
        f"auto / {what}": ratio(times[name, n], times["auto", n]).median
        for what, name in (("best", best), ("plain", "plain"))
    }
    return {"requests": n} | speeds | of
