"""Several samples of one prompt: the time with a single prefill, relative to a batch of identical prompts."""

import functools
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns, ratio, spread


def run(subject: Subject, samples: int, width: int, new_tokens: int, repeats: int) -> None:
    """Publish the times of prefill (one new token) and of whole calls, and whether the tokens are equal."""
    tokens, lengths, _ = subject.request(1, width)
    keys, rows = jax.random.split(jax.random.key(0), samples), []
    requests = {
        "samples": ((tokens, lengths, keys), {"samples_per_prompt": samples}),
        "rows": ((np.repeat(tokens, samples, axis=0), np.repeat(lengths, samples), keys), {}),
    }
    for count in (1, new_tokens):
        calls = {
            name: functools.partial(jspec.generate, subject.target, *request, max_new_tokens=count, **options)
            for name, (request, options) in requests.items()
        }
        times = in_turns(calls, repeats, warmup=1)
        found = {name: np.asarray(call().tokens) for name, call in calls.items()}
        rows.append(_row(count, times, bool(np.array_equal(found["samples"], found["rows"]))))
    publish(
        f"samples-{subject.name}-g{samples}-{jax.default_backend()}",
        f"{subject.name}: {samples} samples of a prompt of {lengths[0]} tokens, {subject.target.dtype}",
        rows,
        plots.bars("new tokens", "x rows"),
        notes=[
            f"Medians of {repeats} calls in turns. samples: samples_per_prompt={samples}. rows: {samples} identical"
            " prompts. x rows: time of samples divided by time of rows; from and to: quartiles.",
        ],
        folder=subject.folder,
    )


def _row(new_tokens: int, times: dict[str, np.ndarray], is_same: bool) -> dict[str, Any]:
    relative = ratio(times["samples"], times["rows"])
    seconds = {f"{name}, s": spread(taken).median for name, taken in times.items()}
    gains = {"x rows": relative.median, "from": relative.low, "to": relative.high}
    return {"new tokens": str(new_tokens), **seconds, **gains, "same tokens": is_same}
