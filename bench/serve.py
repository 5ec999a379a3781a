"""Clients of a server, with the draft and without: what they wait for, and tokens a second, by how many there are."""

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

_MODEL, _WAITING = "model", 1024  # so many requests that nobody is refused
_RATES = 0.5, 0.8, 1.2  # of arrival, as parts of what the plain server can do
_ARRIVALS = 32
_ENOUGH = 0.5  # accepted of judged drafts


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What clients ask, and what they would like.

    Attributes:
        prompts: texts or token ids, in turns.
        new_tokens, temperature: of every request.
        at_once: numbers of clients that are always waiting for an answer.
        first, each: limits of a good answer, seconds to its first text and a token behind that.
    """

    prompts: Sequence[Any]
    new_tokens: int
    temperature: float
    at_once: Sequence[int]
    first: float
    each: float


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a client has met: seconds to the first text, seconds a token behind it, tokens, and figures of drafts."""

    first: float
    each: float
    tokens: int
    drafts: dict[str, Any]


class Clients:
    """All that ask one server; their numbers are seeds, so that all servers have the same work."""

    def __init__(self, api: openai.AsyncOpenAI, traffic: Traffic):
        self._api, self._traffic = api, traffic

    async def ask(self, number: int) -> Answer:
        """One request, streamed."""
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
            extra_body={"ignore_eos": True, "cache_salt": f"{begun}"},  # every prompt is read
        )
        async for chunk in stream:
            times += [time.perf_counter()] if chunk.choices and chunk.choices[0].text else []
            usage = chunk.usage or usage
        tokens = usage.completion_tokens
        each = (times[-1] - times[0]) / max(1, tokens - 1)
        return Answer(times[0] - begun, each, tokens, usage.model_extra["jspec"])

    async def together(self, count: int, total: int) -> list[Answer]:
        """So many clients, each with its next request when the last is answered."""
        left = iter(range(total))

        async def one() -> list[Answer]:
            return [await self.ask(number) for number in left]

        return [answer for answers in await asyncio.gather(*(one() for _ in range(count))) for answer in answers]

    async def arriving(self, rate: float, total: int) -> list[Answer]:
        """Requests at random moments, so many a second (a Poisson process), whatever the server does."""
        moments = np.cumsum(np.random.default_rng(0).exponential(1 / rate, total))

        async def one(number: int) -> Answer:
            await asyncio.sleep(moments[number])
            return await self.ask(number)

        return list(await asyncio.gather(*map(one, range(total))))


def prompts(file: Path | None) -> list[Any]:
    """The lines of a file; without one, held-out Python as the bundled tokenizer reads it."""
    if file is not None:
        return file.read_text(encoding="utf-8").splitlines()
    tokens, lengths, _ = ragged(held_out(load_tokenizer(PAIR / "target"), 16)["inside a module"])
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


@contextlib.contextmanager
def served(options: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A `jspec serve` in a process of its own, and its address."""
    command = [sys.executable, "-m", "jspec", "serve", "--port", "0", "--name", _MODEL,
               "--max-waiting", str(_WAITING), *options]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said = line.strip()
            if " at http://" in said:
                break
        else:
            raise RuntimeError(f"jspec serve has ended: {said}")
        # It would wait for somebody to read what else it says.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield said.rsplit(" ", 1)[1], process
        finally:
            process.terminate()


Load = Callable[[Clients], Awaitable[list[Answer]]]


def run(common: Sequence[str], drafted: Sequence[str], name: str, traffic: Traffic, cost_ratio: float, repeats: int,
        folder: Path | None) -> None:  # fmt: skip
    """Measure two servers in turns and publish.

    Args:
        common, drafted: options of both servers, and of the one that drafts.
        cost_ratio: of a draft step over a target step, for the theory.
    """
    with contextlib.ExitStack() as stack:
        servers = {"plain": [*common, "--plain"], "with the draft": [*common, *drafted]}
        urls = {which: stack.enter_context(served(options))[0] for which, options in servers.items()}
        measure = _Measure(urls, traffic)
        found = {f"{n} at once": measure.in_turns(functools.partial(Clients.together, count=n, total=2 * max(n, 4)),
                                                  repeats) for n in traffic.at_once}  # fmt: skip
        most = max(_speed(turn) for turns in found.values() for turn in turns["plain"]) / traffic.new_tokens
        for rate in [part * most for part in _RATES]:
            load = functools.partial(Clients.arriving, rate=rate, total=_ARRIVALS)
            found[f"{rate:.3g} a second"] = measure.in_turns(load, repeats)
    rows = [row for load, turns in found.items() for row in _rows(load, turns, traffic, cost_ratio)]
    publish(f"serve-{name}-t{traffic.temperature:g}", f"{name}: clients of jspec serve, {traffic.new_tokens} tokens "
            f"each, temperature {traffic.temperature:g}", rows, plots.serve, _notes(rows, traffic, cost_ratio),
            folder or RESULTS)  # fmt: skip


def _notes(rows: Sequence[dict[str, Any]], traffic: Traffic, cost_ratio: float) -> list[str]:
    notes = [f"A good answer begins within {traffic.first * 1e3:.0f} ms and has {traffic.each * 1e3:.0f} ms a token; "
             f"theory: theorem 3.8 with a draft step of {cost_ratio:g} target steps."]  # fmt: skip
    rate = min((row["acceptance"] for row in rows if row["acceptance"] != ""), default=1.0)
    if rate < _ENOUGH:
        notes.append(f"Of the drafts that were judged {rate:.2f} were accepted; with so few a smaller "
                     "--num-draft-tokens, or another draft, should be faster.")  # fmt: skip
    return notes


def _speed(turn: tuple[float, list[Answer]]) -> float:
    """Tokens a second."""
    seconds, answers = turn
    return sum(answer.tokens for answer in answers) / seconds


class _Measure:
    """Loads on servers in turns; the first turn is warm-up."""

    def __init__(self, urls: dict[str, str], traffic: Traffic):
        self._urls, self._traffic = urls, traffic

    def in_turns(self, load: Load, repeats: int) -> dict[str, list[tuple[float, list[Answer]]]]:
        """By server: seconds of each turn, and the answers."""
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
            "tokens a round": sum(one.tokens for one in answers) / sums["rounds"],
            "acceptance": rate,
            "good a second": float(good),
        } | {f"{what} {q}, ms": float(np.percentile(values, int(q[1:]))) * 1e3
             for what, values in (("TTFT", first), ("TPOT", each)) for q in ("p50", "p99")}  # fmt: skip
