"""Random grammars, valid and hostile, beside streams of a server: who crashes, waits or fills the memory."""

import asyncio
import contextlib
import json
import random
import subprocess
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
_TURN = 30.0  # seconds with grammars, and as many without
_PATIENCE = 120  # seconds for any answer
_WORDS = ("name", "size", "value", "a", "b", "^a")


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A random schema; about a third of its parts are hostile: large, contradictory or nonsense."""
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
    return rng.choice((
        {"$defs": {f"d{i}": one for i, one in enumerate(link)}, "$ref": "#/$defs/d0"},
        {"type": "integer", "multipleOf": rng.randrange(1, 10**7)},
        {"allOf": [{"type": "integer", "multipleOf": k} for k in rng.sample(range(2, 60), 3)]},
        {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(rng.randrange(2, 12))]},
        {"type": "object", "patternProperties": {f"^a{i}.*b{i}$": {} for i in range(min(size, 100))}},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^a$": {}}, "required": ["a"],
         "additionalProperties": False},
        {"$ref": "#"}, {"type": rng.choice(("nope", 3, None))}, {"enum": [*range(10 * size)]}, json.loads(deep),
    ))  # fmt: skip


def regex(rng: random.Random) -> str:
    """A random regular expression; some are invalid."""
    parts = ("a", "b", ".", "[a-z]", r"\d", r"\p{L}", "(a|b)*", "(a+)+", "a{3,50}", "(?:a?){99}", "(", ".*", "$", "^",
             ".{20}b", "[^a]{0,2000}", "(x|y){1000}", "é")  # fmt: skip
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 8)))


def body(rng: random.Random) -> dict[str, Any]:
    """A random request with a response format."""
    if rng.random() < 0.3:
        wanted: dict[str, Any] = {"type": "regex", "regex": regex(rng)}
    else:
        made = schema(rng)
        wanted = {"type": "json_schema", "json_schema": {"schema": made}}
    return {"prompt": "{", "max_tokens": 48, "seed": rng.randrange(2**31), "response_format": wanted,
            "stream": rng.random() < 0.3, "n": rng.choice((1, 1, 1, 3))}  # fmt: skip


class _Load:
    """Streams, whose waits are noted, and grammars beside them at times."""

    def __init__(self, client: httpx.AsyncClient, end: float):
        self._client, self._end = client, end
        self.has_grammars, self.waits, self.outcomes = False, {False: [], True: []}, Counter()

    async def stream(self, number: int) -> None:
        """Ask for texts without a constraint, one after another, and note the seconds between their events."""
        while time.monotonic() < self._end:
            asked = {
                "model": "model",
                "prompt": f"def f{number}(",
                "max_tokens": 400,
                "ignore_eos": True,
                "stream": True,
            }
            last, before = None, self.has_grammars
            async with self._client.stream("POST", "/v1/completions", json=asked) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None and before == self.has_grammars:
                        self.waits[before].append(now - last)
                    last, before = now, self.has_grammars

    async def fuzz(self, rng: random.Random) -> None:
        """Send random grammars while it is their turn."""
        while time.monotonic() < self._end:
            if not self.has_grammars:
                await asyncio.sleep(0.05)
                continue
            try:
                answer = await self._client.post("/v1/completions", json={"model": "model"} | body(rng))
                self.outcomes[f"HTTP {answer.status_code}"] += 1
            except httpx.HTTPError as error:
                self.outcomes[type(error).__name__] += 1

    async def turns(self, seconds: float) -> None:
        """Take turns with and without grammars, so that both meet the same machine."""
        while time.monotonic() < self._end:
            await asyncio.sleep(seconds)
            self.has_grammars = not self.has_grammars


def memory(process: int) -> float:
    """MiB of a process and its descendants."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
    family = {process}
    for _ in range(4):
        family |= {child for child, parent, _ in rows if parent in family}
    return sum(size for child, _, size in rows if child in family) / 1024


async def _play(url: str, process: int, minutes: float, turn: float, seed: int) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE, limits=limits) as client:
        warm = _Load(client, time.monotonic() + turn)  # until the programs of constrained requests are compiled
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
        await asyncio.sleep(15)  # what was being compiled ends
        health = (await client.get("/health")).status_code
        after = memory(process)
    p99 = [float(np.percentile(load.waits[kind], 99)) * 1e3 for kind in (False, True)]
    return {"minutes": minutes, "grammars": load.outcomes.total(), "p99 alone, ms": p99[0], "p99 beside, ms": p99[1],
            "x": p99[1] / p99[0], "MiB before": before, "MiB after": after, "health": health,
            "outcomes": json.dumps(load.outcomes)}  # fmt: skip


def run(minutes: float, folder: Path | None) -> None:
    """Serve the bundled pair and publish what its streams waited for."""
    with served(["--slots", "12"]) as (url, process):
        row = asyncio.run(_play(url, process.pid, minutes, _TURN, 0))
        process.terminate()
        begun = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        row["crashes"] = int(process.returncode != 0)
        row["s to end"] = time.monotonic() - begun
    publish(f"grammars-{minutes:g}", "Random grammars beside four streams", [row], _draw, folder=folder or RESULTS)


def _draw(figure: Figure, rows: plots.Rows) -> None:
    axes = figure.subplots()
    axes.bar(["alone", "beside grammars"], [rows[0]["p99 alone, ms"], rows[0]["p99 beside, ms"]])
    axes.set_ylabel("p99 between two events, ms")
