"""Drafting under a JSON schema: the draft length that the engine chooses, a fixed length, and plain decoding."""

import contextlib
import dataclasses
import time
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns, ratio, spread
from jspec.engine import Engine, Request, Result
from jspec.engine.grammars import Grammars
from jspec.text.chat_template import encode

K = 4  # the fixed draft length
_PEOPLE = "a teacher", "a nurse", "a farmer", "a student", "a cook", "a pilot", "a judge", "a baker"
_TEXT = {"type": "string", "maxLength": 40}


def _object(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object in which every property is required."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


SCHEMA = _object(
    name=_TEXT,
    age={"type": "integer", "minimum": 0, "maximum": 120},
    address=_object(street=_TEXT, city=_TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"}),
    hobbies={"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 4},
    employed={"type": "boolean"},
)


def run(subject: Subject, slots: int, new_tokens: int, temperature: float, repeats: int) -> None:
    """Measure all engines in turns on the same requests, and publish the results. Half of the requests have a key."""
    prompts = _prompts(subject.tokenizer)
    length = max(map(len, prompts)) + new_tokens
    with contextlib.ExitStack() as stack:
        grammars = stack.enter_context(Grammars(subject.tokenizer, subject.target.config.vocab_size))
        request = Request(
            prompts[0],
            new_tokens,
            jspec.SamplingParams(temperature=temperature),
            eos_ids=(subject.tokenizer.eos_token_id,),
            constraint=grammars.json_schema(SCHEMA),
        )
        keys = jax.random.split(jax.random.key(0), len(prompts))
        requests = [
            dataclasses.replace(request, tokens=prompt, key=keys[i] if i % 2 else None)
            for i, prompt in enumerate(prompts)
        ]

        def compiled(draft: Any, **options: Any) -> Engine:
            engine = Engine(subject.target, draft, slots=slots, max_length=length, **options)
            return _all_compiled(stack.enter_context(engine))

        engines = {"plain": compiled(None), f"K = {K}": compiled(subject.draft, num_draft_tokens=K)}
        engines["auto"] = compiled(subject.draft)
        results: dict[str, list[list[Result]]] = {name: [] for name in engines}
        calls = {
            name: lambda name=name, engine=engine: results[name].append(engine.generate(requests))
            for name, engine in engines.items()
        }
        times = in_turns(calls, repeats)
    rows = [
        _row(name, times, [result for turn in turns[-repeats:] for result in turn]) for name, turns in results.items()
    ]
    publish(
        f"constraints-{subject.name}-s{slots}-t{temperature:g}-{jax.default_backend()}",
        f"{subject.name}: {len(prompts)} requests with a JSON schema, {slots} at once, temperature {temperature:g}",
        rows,
        plots.bars("engine", "tokens/s"),
        folder=subject.folder,
    )


def _prompts(tokenizer: Any) -> list[tuple[int, ...]]:
    """Return prompts that ask for JSON: questions for a chat model, or the first lines of Python modules otherwise."""
    if getattr(tokenizer, "chat_template", None) is None:
        texts = [f"# Describe {person}\nperson = json.loads('''" for person in _PEOPLE]
        return [tuple(tokenizer(text)["input_ids"]) for text in texts]
    keys = ", ".join(SCHEMA["properties"])
    encoded = encode(
        tokenizer,
        [[{"role": "user", "content": f"Describe {person} as JSON with the keys {keys}."}] for person in _PEOPLE],
    )
    return [tuple(ids[:length].tolist()) for ids, length in zip(encoded.tokens, encoded.lengths, strict=True)]


def _all_compiled(engine: Engine) -> Engine:
    """Wait until all programs for constrained requests are compiled."""
    engine.expect_constraints()
    lengths = engine.device.sizes.lengths
    shapes = [(variant, count) for count, variant in engine.device.sizes.shapes]
    while not engine.device.can_constrain or any(engine.device.lengths(*shape) != lengths(*shape) for shape in shapes):
        time.sleep(0.1)
    return engine


def _row(name: str, times: dict[str, np.ndarray], results: list[Result]) -> dict[str, Any]:
    """Return an engine's figures. Speed is measured in tokens, because requests without a key have different texts."""
    assert all(result.error is None for result in results), "a request has failed"
    rounds = [entry for result in results for entry in zip(result.drafted, result.accepted, strict=True)]
    drafted, accepted = (sum(part) for part in zip(*rounds, strict=True))
    judged, tokens = (sum(map(sum, (r.judged for r in results))), sum(len(r.tokens) for r in results))
    turns = len(times[name])
    return {
        "engine": name,
        "tokens/s": spread(tokens / turns / times[name]).median,
        "plain's time / time": ratio(times["plain"], times[name]).median,
        "tokens per round": tokens / len(rounds),
        "rounds with a draft": sum(count > 0 for count, _ in rounds) / len(rounds),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / judged if judged else "",
    }
