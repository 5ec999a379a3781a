"""Clients of a server with and without a draft: waiting times and tokens per second, by the number of clients."""

import asyncio
import contextlib
import dataclasses
import functools
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai

from bench import plots
from bench.report import RESULTS, publish
from bench.subject import held_out, ragged
from jspec import theory
from jspec.bundled import PAIR
from jspec.text import load_tokenizer

_MODEL, _WAITING = "model", 1024  # waiting requests: enough that none is rejected
_RATES = 0.5, 0.8, 1.2  # arrival rates, as shares of the plain server's capacity
_ARRIVALS = 32
_ENOUGH = 0.5  # minimum acceptance rate


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The clients' requests and their latency limits.

    Attributes:
        prompts: text or token ids, used in turn.
        new_tokens, temperature: options of every request.
        at_once: the numbers of clients that are always waiting for an answer.
        first, each: the limits of a good answer, in seconds to its first text and in seconds per token after that.
    """

    prompts: Sequence[Any]
    new_tokens: int
    temperature: float
    at_once: Sequence[int]
    first: float
    each: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """A client's result: seconds to the first text, seconds per token after it, tokens, and draft statistics."""

    first: float
    each: float
    tokens: int
    drafts: dict[str, Any]


class Clients:
    """All clients of one server. Request numbers serve as seeds, so that all servers have the same work."""

    def __init__(self, api: openai.AsyncOpenAI, traffic: Traffic):
        self._api, self._traffic = api, traffic

    async def ask(self, number: int) -> Answer:
        """Send one streamed request."""
        of = self._traffic
        begun, usage = time.perf_counter(), None
        times: list[float] = []
        stream = await self._api.completions.create(
            model=_MODEL,
            prompt=of.prompts[number % len(of.prompts)],
            max_tokens=of.new_tokens,
            temperature=of.temperature,
            seed=number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "cache_salt": f"{begun}"},  # every prompt is prefilled
        )
        async for chunk in stream:
            times += [time.perf_counter()] if chunk.choices and chunk.choices[0].text else []
            usage = chunk.usage or usage
        tokens = usage.completion_tokens
        each = (times[-1] - times[0]) / max(1, tokens - 1)
        return Answer(times[0] - begun, each, tokens, usage.model_extra["jspec"])

    async def together(self, count: int, total: int) -> list[Answer]:
        """Run `count` clients, each of which sends its next request when the previous one is answered."""
        left = iter(range(total))

        async def one() -> list[Answer]:
            return [await self.ask(number) for number in left]

        return [answer for answers in await asyncio.gather(*(one() for _ in range(count))) for answer in answers]

    async def arriving(self, rate: float, total: int) -> list[Answer]:
        """Send requests at random moments, `rate` per second (a Poisson process), regardless of the server's speed."""
        moments = np.cumsum(np.random.default_rng(0).exponential(1 / rate, total))

        async def one(number: int) -> Answer:
            await asyncio.sleep(moments[number])
            return await self.ask(number)

        return list(await asyncio.gather(*map(one, range(total))))


def prompts(file: Path | None) -> list[Any]:
    """Return the lines of a file, or held-out Python code in the bundled tokenizer's ids if there is no file."""
    if file is not None:
        return file.read_text(encoding="utf-8").splitlines()
    tokens, lengths, _ = ragged(held_out(load_tokenizer(PAIR / "target"), 16)["inside a module"])
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@contextlib.contextmanager
def served(options: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `jspec serve` in a separate process, and yield its address and the process."""
    command = [sys.executable, "-m", "jspec", "serve", "--port", "0", "--name", _MODEL]
    command += ["--max-waiting", str(_WAITING), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said = line.strip()
            if " at http://" in said:
                break
        else:
            raise RuntimeError(f"jspec serve has ended: {said}")
        # The server would block if its further output were not read.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield said.rsplit(" ", 1)[1], process
        finally:
            process.terminate()


Load = Callable[[Clients], Awaitable[list[Answer]]]


def run(
    common: Sequence[str],
    drafted: Sequence[str],
    name: str,
    traffic: Traffic,
    cost_ratio: float,
    repeats: int,
    folder: Path | None,
) -> None:
    """Measure two servers in turns and publish the results.

    Args:
        common, drafted: options for both servers, and for the server with a draft.
        cost_ratio: the cost of a draft step over that of a target step, for the theory.
    """
    with contextlib.ExitStack() as stack:
        servers = {"plain": [*common, "--plain"], "with the draft": [*common, *drafted]}
        urls = {which: stack.enter_context(served(options))[0] for which, options in servers.items()}
        measure = _Measure(urls, traffic)
        found = {
            f"{n} at once": measure.in_turns(functools.partial(Clients.together, count=n, total=2 * max(n, 4)), repeats)
            for n in traffic.at_once
        }
        most = max(_speed(turn) for turns in found.values() for turn in turns["plain"]) / traffic.new_tokens
        for rate in [part * most for part in _RATES]:
            load = functools.partial(Clients.arriving, rate=rate, total=_ARRIVALS)
            found[f"{rate:.3g} per second"] = measure.in_turns(load, repeats)
    rows = [row for load, turns in found.items() for row in _rows(load, turns, traffic, cost_ratio)]
    publish(
        f"serve-{name}-t{traffic.temperature:g}",
        f"{name}: clients of jspec serve, {traffic.new_tokens} tokens each, temperature {traffic.temperature:g}",
        rows,
        plots.serve,
        _notes(rows, traffic, cost_ratio),
        folder or RESULTS,
    )


def _notes(rows: Sequence[dict[str, Any]], traffic: Traffic, cost_ratio: float) -> list[str]:
    notes = [
        f"A good answer starts within {traffic.first * 1e3:.0f} ms and takes at most {traffic.each * 1e3:.0f} ms per "
        f"token; theory: theorem 3.8 with a draft step that costs {cost_ratio:g} target steps."
    ]
    rate = min((row["acceptance"] for row in rows if row["acceptance"] != ""), default=1.0)
    if rate < _ENOUGH:
        notes.append(
            f"Only {rate:.2f} of the verified draft tokens were accepted; a smaller --num-draft-tokens or another "
            "draft should be faster."
        )
    return notes


def _speed(turn: tuple[float, list[Answer]]) -> float:
    """Return tokens per second."""
    seconds, answers = turn
    return sum(answer.tokens for answer in answers) / seconds


class _Measure:
    """Measures loads on servers in turns. The first turn is a warm-up."""

    def __init__(self, urls: dict[str, str], traffic: Traffic):
        self._urls, self._traffic = urls, traffic

    def in_turns(self, load: Load, repeats: int) -> dict[str, list[tuple[float, list[Answer]]]]:
        """Return the seconds and answers of each turn, keyed by server."""
        found: dict[str, list[tuple[float, list[Answer]]]] = {name: [] for name in self._urls}
        for turn in range(repeats + 1):
            for name, url in self._urls.items():
                one = asyncio.run(self._one(load, url))
                found[name] += [one] * bool(turn)
        return found

    async def _one(self, load: Load, url: str) -> tuple[float, list[Answer]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as api:
            begun = time.perf_counter()
            answers = await load(Clients(api, self._traffic))
            return time.perf_counter() - begun, answers


def _rows(load: str, found: dict[str, Any], traffic: Traffic, cost_ratio: float) -> Iterator[dict[str, Any]]:
    speeds = {name: np.array([*map(_speed, turns)]) for name, turns in found.items()}
    for name, turns in found.items():
        answers = [answer for _, one in turns for answer in one]
        first, each = (np.array([getattr(one, what) for one in answers]) for what in ("first", "each"))
        good = np.sum((first <= traffic.first) & (each <= traffic.each)) / sum(seconds for seconds, _ in turns)
        sums = {what: sum(one.drafts[what] for one in answers) for what in ("rounds", "drafted", "judged", "accepted")}
        rate = sums["accepted"] / sums["judged"] if sums["judged"] else ""
        k = round(sums["drafted"] / sums["rounds"])
        yield {
            "load": load,
            "server": name,
            "tokens/s": float(np.median(speeds[name])),
            "x plain": float(np.median(speeds[name] / speeds["plain"])),
            "theory": float(theory.speedup(rate, k, cost_ratio)) if k and rate != "" else 1.0,
            "tokens per round": sum(one.tokens for one in answers) / sums["rounds"],
            "acceptance": rate,
            "good per second": float(good),
        } | {
            f"{what} {q}, ms": float(np.percentile(values, int(q[1:]))) * 1e3
            for what, values in (("TTFT", first), ("TPOT", each))
            for q in ("p50", "p99")
        }
