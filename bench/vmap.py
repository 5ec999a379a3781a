"""`jax.vmap` over single prompts: the time relative to one batch of the same prompts."""

import functools

import jax
import numpy as np
from jax import Array

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns, ratio, spread


def run(subject: Subject, batch: int, width: int, new_tokens: int, repeats: int) -> None:
    """Publish both times, with and without a draft, and whether the tokens are equal."""
    request, rows = subject.request(batch, width), []
    for draft in (None, subject.draft):

        @jax.jit
        def together(target: jspec.Llama, draft: object, tokens: Array, lengths: Array, keys: Array) -> Array:
            return _call(target, draft, tokens, lengths, keys, new_tokens)

        @jax.jit
        def mapped(target: jspec.Llama, draft: object, *request: Array) -> Array:
            single = jax.tree.map(lambda leaf: leaf[:, None], request)
            return jax.vmap(lambda *prompt: _call(target, draft, *prompt, new_tokens)[0])(*single)

        arguments = subject.target, draft, *request
        calls = {name: functools.partial(call, *arguments) for name, call in (("batch", together), ("vmap", mapped))}
        times = in_turns(calls, repeats, warmup=1)
        relative = ratio(times["vmap"], times["batch"])
        rows.append(
            {
                "draft": "none" if draft is None else "model",
                **{f"{name}, s": spread(taken).median for name, taken in times.items()},
                "x batch": relative.median,
                "from": relative.low,
                "to": relative.high,
                "same tokens": bool(np.array_equal(calls["batch"](), calls["vmap"]())),
            }
        )
    publish(
        f"vmap-{subject.name}-b{batch}-{jax.default_backend()}",
        f"{subject.name}: jax.vmap over {batch} prompts of {width} tokens, {subject.target.dtype}",
        rows,
        plots.bars("draft", "x batch"),
        notes=[
            f"Medians of {repeats} calls in turns, {new_tokens} new tokens each. x batch: time of"
            " jax.jit(jax.vmap(...)) over single prompts divided by time of one batch; from and to: quartiles."
        ],
        folder=subject.folder,
    )


def _call(target: jspec.Llama, draft: object, tokens: Array, lengths: Array, keys: Array, new_tokens: int) -> Array:
    if draft is None:
        return jspec.generate(target, tokens, lengths, keys, max_new_tokens=new_tokens).tokens
    return jspec.speculative_generate(target, draft, tokens, lengths, keys, max_new_tokens=new_tokens).tokens
