"""Random grammars, valid and hostile, alongside a server's streams: crashes, waits and memory.

The streams run alone, alongside requests without a grammar, and alongside requests with a grammar, in turns. The second
case shows how much of the third case's delay is due only to the additional requests.
"""

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from matplotlib.figure import Figure

from bench import plots
from bench.report import RESULTS, publish
from bench.serve import served

_STREAMS, _AT_ONCE = 4, 4
_TURN = 30.0  # seconds
_ALONE, _BESIDE_TEXTS, _BESIDE_GRAMMARS = _TURNS = "alone", "beside texts", "beside grammars"
_PATIENCE = 120  # seconds for any answer
_WORDS = ("name", "size", "value", "a", "b", "^a")


def schema(rng: random.Random, depth: int = 0) -> Any:
    """Return a random schema. About a third of its parts are hostile: large, contradictory or nonsense."""
    makers = [_scalar, _text, _hostile] + [_object, _array, _combined] * (depth < 4)
    return rng.choice(makers)(rng, depth)


def _scalar(rng: random.Random, _: int) -> Any:
    kind = rng.choice(("integer", "number", "boolean", "null", "enum"))
    if kind == "enum":
        return {"enum": [rng.choice((word, 1, None)) for word in _WORDS] * rng.choice((1, 1, 100))}
    limits = {"minimum": -rng.randrange(10 ** rng.randrange(1, 20)), "multipleOf": 10 ** rng.randrange(6) + 7}
    return {"type": kind} | {name: value for name, value in limits.items() if rng.random() < 0.2}


def _text(rng: random.Random, _: int) -> Any:
    limits = {
        "maxLength": 10 ** rng.randrange(6),
        "pattern": regex(rng),
        "format": rng.choice(("email", "date", "uri")),
    }
    return {"type": "string"} | {name: value for name, value in limits.items() if rng.random() < 0.3}


def _object(rng: random.Random, depth: int) -> Any:
    parts = {name: schema(rng, depth + 1) for name in rng.sample(_WORDS, rng.randrange(1, 4))}
    made: dict[str, Any] = {"type": "object", "properties": parts, "required": rng.sample([*parts], len(parts) // 2)}
    if rng.random() < 0.3:
        made["patternProperties"] = {regex(rng): schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))}
    return made | ({"additionalProperties": False} if rng.random() < 0.5 else {})


def _array(rng: random.Random, depth: int) -> Any:
    made = {"type": "array", "items": schema(rng, depth + 1)}
    return made | {name: 10 ** rng.randrange(5) for name in ("minItems", "maxItems") if rng.random() < 0.2}


def _combined(rng: random.Random, depth: int) -> Any:
    return {rng.choice(("anyOf", "allOf", "oneOf")): [schema(rng, depth + 1) for _ in range(rng.randrange(1, 6))]}


def _hostile(rng: random.Random, _: int) -> Any:
    size = 10 ** rng.randrange(1, 4)
    link = [{"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]} for i in range(size)]
    deep = '{"items":' * min(size, 400) + "{}" + "}" * min(size, 400)
    dead_end = {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}, "required": ["a"]}
    return rng.choice(
        (
            {"$defs": {f"d{i}": one for i, one in enumerate(link)}, "$ref": "#/$defs/d0"},
            {"type": "integer", "multipleOf": rng.randrange(1, 10**7)},
            {"allOf": [{"type": "integer", "multipleOf": k} for k in rng.sample(range(2, 60), 3)]},
            {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(rng.randrange(2, 12))]},
            {"type": "object", "patternProperties": {f"^a{i}.*b{i}$": {} for i in range(min(size, 100))}},
            dead_end | {"additionalProperties": False},
            {"$ref": "#"},
            {"type": rng.choice(("nope", 3, None))},
            {"enum": [*range(10 * size)]},
            json.loads(deep),
        )
    )


def regex(rng: random.Random) -> str:
    """Return a random regular expression, which may be invalid."""
    parts = (
        *("a", "b", ".", "[a-z]", r"\d", r"\p{L}", "(a|b)*", "(a+)+", "a{3,50}", "(?:a?){99}"),
        *("(", ".*", "$", "^", ".{20}b", "[^a]{0,2000}", "(x|y){1000}", "é"),
    )
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 8)))


def body(rng: random.Random) -> dict[str, Any]:
    """Return a random request with a response format."""
    if rng.random() < 0.3:
        wanted: dict[str, Any] = {"type": "regex", "regex": regex(rng)}
    else:
        made = schema(rng)
        wanted = {"type": "json_schema", "json_schema": {"schema": made}}
    return {
        "prompt": "{",
        "max_tokens": 48,
        "seed": rng.randrange(2**31),
        "response_format": wanted,
        "stream": rng.random() < 0.3,
        "n": rng.choice((1, 1, 1, 3)),
    }


class _Load:
    """Streams whose waits are recorded, with other requests alongside them in some turns."""

    def __init__(self, client: httpx.AsyncClient, end: float):
        self._client, self._end = client, end
        self.turn, self.waits, self.outcomes = _ALONE, {turn: [] for turn in _TURNS}, Counter()

    async def stream(self, number: int) -> None:
        """Request unconstrained text repeatedly, and record the seconds between the events."""
        while time.monotonic() < self._end:
            asked = {
                "model": "model",
                "prompt": f"def f{number}(",
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": True,
            }
            last, before = None, self.turn
            async with self._client.stream("POST", "/v1/completions", json=asked) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None and before == self.turn:
                        self.waits[before].append(now - last)
                    last, before = now, self.turn

    async def fuzz(self, rng: random.Random) -> None:
        """Send random requests, with or without a grammar, while it is their turn."""
        while time.monotonic() < self._end:
            if self.turn == _ALONE:
                await asyncio.sleep(0.05)
                continue
            asked = {"model": "model"} | body(rng)
            if self.turn == _BESIDE_TEXTS:
                del asked["response_format"]
            try:
                answer = await self._client.post("/v1/completions", json=asked)
                self.outcomes[f"HTTP {answer.status_code}"] += "response_format" in asked
                if answer.is_server_error:
                    print(answer.status_code, answer.text, json.dumps(asked), file=sys.stderr)
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1

    async def turns(self, seconds: float) -> None:
        """Alternate the three cases, so that all run under the same machine conditions."""
        for self.turn in itertools.cycle(_TURNS):
            if time.monotonic() >= self._end:
                return
            await asyncio.sleep(seconds)


def memory(process: int) -> float:
    """Return the memory use of a process and its descendants, in MiB."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
    family = {process}
    for _ in range(4):
        family |= {child for child, parent, _ in rows if parent in family}
    return sum(size for child, _, size in rows if child in family) / 1024


async def _play(url: str, process: int, minutes: float, turn: float, seed: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE, limits=limits) as client:
        warm = _Load(client, time.monotonic() + turn)  # wait until the programs for constrained requests are compiled
        good = {
            "model": "model",
            "prompt": "{",
            "max_tokens": 8,
            "response_format": {"type": "regex", "regex": "[a-z]{4}"},
        }
        for _ in range(2):
            await client.post("/v1/completions", json=good, timeout=1800)
        await asyncio.gather(*(warm.stream(i) for i in range(_STREAMS)))
        before = memory(process)
        load = _Load(client, time.monotonic() + 60 * minutes)
        rngs = [random.Random(f"{seed} {i}") for i in range(_AT_ONCE)]
        await asyncio.gather(load.turns(turn), *(load.stream(i) for i in range(_STREAMS)), *map(load.fuzz, rngs))
        await asyncio.sleep(15)  # wait for compilations in progress
        health = (await client.get("/health")).status_code
        after = memory(process)
    p99 = {f"p99 {turn}, ms": float(np.percentile(waits, 99)) * 1e3 for turn, waits in load.waits.items()}
    alone, texts, grammars = p99.values()
    return {
        "minutes": minutes,
        "grammars": load.outcomes.total(),
        **p99,
        "grammars / alone": grammars / alone,
        "grammars / texts": grammars / texts,
        "MiB before": before,
        "MiB after": after,
        "health": health,
        "outcomes": json.dumps(load.outcomes),
    }


def run(minutes: float, folder: Path | None) -> None:
    """Serve the bundled pair and publish its streams' waits."""
    with served(["--slots", "12"]) as (url, process):
        row = asyncio.run(_play(url, process.pid, minutes, _TURN, 0))
        process.terminate()
        begun = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        row["crashes"] = int(process.returncode != 0)
        row["s to end"] = time.monotonic() - begun
    publish(f"grammars-{minutes:g}", "Random grammars alongside four streams", [row], _draw, folder=folder or RESULTS)


def _draw(figure: Figure, rows: plots.Rows) -> None:
    axes = figure.subplots()
    axes.bar(_TURNS, [rows[0][f"p99 {turn}, ms"] for turn in _TURNS])
    axes.set_ylabel("p99 between two events, ms")
