"""Calls of functions through OpenAI's client: valid arguments, no effect of drafts, and the time to the first token."""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
from common import NAME, Report, client, pair

from bench.serve import served

LEAVES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -50, "maximum": 9999},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"enum": ["red", "green", "dark blue", 7, None]},
    {"const": "fixed"},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z]{2,6}$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    {
        "type": "array",
        "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, {"enum": ["x", "y"]}],
        "items": False,
    },
    {"$ref": "#/$defs/point"},
]
POINT = {"type": "object", "properties": {"x": LEAVES[0], "y": LEAVES[0]}, "required": ["x", "y"]}
MESSAGES = [{"role": "user", "content": "What will the weather be in Paris over the next three days?"}]
WEATHER = {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1, "maximum": 14}}


def closed(properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def schema(number: int) -> dict[str, Any]:
    """Return a schema of arguments, chosen at random."""
    rng = np.random.default_rng(number)
    names = [f"{word}_{i}" for i, word in enumerate(rng.choice(["size", "when", "mode", "tags"], rng.integers(1, 5)))]
    properties = {name: LEAVES[rng.integers(len(LEAVES))] for name in names}
    if rng.random() < 0.3:
        properties["inner"] = closed({"leaf": LEAVES[rng.integers(len(LEAVES) - 1)]}, ["leaf"])
    required = [name for name in properties if rng.random() < 0.7]
    made = closed(properties, required)
    if "#/$defs/point" in json.dumps(made):  # the bundled model has little room for a prompt
        made["$defs"] = {"point": closed(POINT["properties"], POINT["required"])}
    return made


def body(number: int, schemas: int) -> dict[str, Any]:
    """Return a request for one call: greedy if its number is even, and otherwise sampled."""
    functions = [{"name": f"f{i}", "parameters": schema((number + i) % schemas)} for i in range(2)]
    sampling = {"temperature": 1.0, "seed": number} if number % 2 else {"temperature": 0.0}
    tools = [{"type": "function", "function": function} for function in functions]
    fields = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 600}
    return {"model": NAME, "messages": MESSAGES, **sampling, **fields}


async def calls(url: str, count: int, schemas: int) -> list[Any]:
    """Return the choice that answers each request."""
    room = asyncio.Semaphore(8)
    async with client(url) as api:

        async def one(number: int) -> Any:
            async with room:
                return (await api.chat.completions.create(**body(number, schemas))).choices[0]

        return await asyncio.gather(*map(one, range(count)))


def fault(number: int, choice: Any, schemas: int) -> str:
    """Return what is wrong with a choice; an empty string if it is one call with arguments of the function's schema."""
    calls = choice.message.tool_calls or []
    if choice.finish_reason != "tool_calls" or len(calls) != 1:
        return f"{choice.finish_reason}: {choice.message}"
    function = calls[0].function
    wanted = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body(number, schemas)["tools"]}
    errors = jsonschema.Draft202012Validator(wanted[function.name]).iter_errors(json.loads(function.arguments))
    return "".join(f"{function}: {error.message} " for error in errors)


async def first(api: Any, **fields: Any) -> float:
    """Return the seconds until the first chunk of a stream."""
    begun = time.perf_counter()
    chunks = await api.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=24, temperature=0.0, stream=True, **fields
    )
    found = None
    async for _ in chunks:
        found = found or time.perf_counter() - begun
    assert found is not None, "the stream is empty"
    return found


async def first_chunks(url: str, turns: int) -> tuple[float, float]:
    """Return the median time to the first chunk of a plain chat and of a required call, in turns, warm."""
    function = {"name": "weather", "parameters": closed(WEATHER, [*WEATHER])}
    forced = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    plain, calling = [], []
    async with client(url) as api:
        for _ in range(turns + 3):  # the first turns warm the caches
            for times, fields in ((plain, {}), (calling, forced)):
                await first(api, **fields)  # on a CPU, single requests share one slot, so the prompt must be in it
                times.append(await first(api, **fields))
    return float(np.median(plain[3:])), float(np.median(calling[3:]))


def main() -> None:
    """Run all checks, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--schemas", type=int, default=50)
    parser.add_argument("--turns", type=int, default=21)
    options, report, found = parser.parse_args(), Report(), []
    for extra in ([], ["--draft", "none"]):
        with pair(["--dtype", "float32", *extra]) as (url, _):
            found.append(asyncio.run(calls(url, options.calls, options.schemas)))
    faults = [fault(i, choice, options.schemas) for i, choice in enumerate(found[0])]
    for i, wrong in enumerate(faults):
        if wrong:
            print(f"      {i}: {wrong}")
    valid = faults.count("")
    report.tell(
        f"{options.calls} required calls over {options.schemas} schemas: valid",
        f"{valid}",
        valid == options.calls,
    )
    texts = [[choice.message.tool_calls[0].function.arguments for choice in part] for part in found]
    same = sum(one == other for one, other in zip(*texts, strict=True))
    report.tell("required calls with the same arguments without a draft", f"{same}", same == options.calls)
    with served(["smollm2", "--max-length", "2048"]) as (url, _):
        plain, calling = asyncio.run(first_chunks(url, options.turns))
    report.tell(
        "SmolLM2, seconds to the first chunk of a required call and of a plain chat, warm",
        f"{calling:.3f} {plain:.3f} ({calling / plain:.2f}x)",
        calling <= 1.1 * plain,
    )
    report.end()


if __name__ == "__main__":
    main()
