"""The cost of `jspec.quantize`: how far it changes a model's distribution, and what it saves in bytes and time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench import plots
from bench.acceptance import acceptance_rate
from bench.pairs import weight_bytes
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.subject import WIDTH, Subject, held_out
from bench.timing import in_turns
from jspec.models.llama import matrices

KINDS = ("int8", "int4")
ROWS, K, NEW_TOKENS = (1, 5), 4, 64
_BATCH = 4  # windows whose logits are in memory at the same time


def run(subject: Subject, windows: int, repeats: int) -> None:
    """Publish one row for the model as loaded, and one for each kind in `KINDS`.

    Raises:
        ValueError: the model cannot be quantised on this device.
    """
    models = {"as loaded": subject.target} | {kind: jspec.quantize(subject.target, kind) for kind in KINDS}
    texts = np.concatenate(list(held_out(subject.tokenizer, windows).values()))
    passes = {f"{name}, {rows}": Pass(model, rows) for name, model in models.items() for rows in ROWS}
    taken = pass_seconds(passes, in_turns(passes, repeats))
    table: list[dict[str, Any]] = []
    for name, model in models.items():
        row: dict[str, Any] = {"weights": name, "format": _formats(model), "MB": weight_bytes(model) / 1e6}
        row |= _distance(subject.target, model, texts) | {"accepted": _accepted(subject, model, windows)}
        for rows in ROWS:
            seconds = taken[f"{name}, {rows}"]
            row |= {f"ms, {rows} rows": seconds * 1e3, f"relative, {rows} rows": seconds / taken[f"as loaded, {rows}"]}
        table.append(row)
    publish(
        f"quantization-{subject.name}-{jax.default_backend()}",
        f"{subject.name}: cost of quantising, {len(texts)} held-out texts of {WIDTH} tokens, {subject.target.dtype}",
        table,
        plots.bars("weights", f"ms, {ROWS[0]} rows"),
        notes=[
            "KL: mean KL(as loaded || quantised), nats per token; greedy: share of equal most likely tokens; accepted:"
            f" acceptance rate as the draft of the model as loaded, K = {K}, temperature 1, {windows} prompts,"
            f" {NEW_TOKENS} new tokens each. MB: what a pass reads. Medians of {repeats} readings in turns."
        ],
        folder=subject.folder,
    )


def _formats(model: jspec.Llama) -> str:
    """Return the formats of the model's matrices."""
    found: set[str] = set()
    for module in matrices(model).values():
        found |= {part.format for part in module.parts} if module.parts else {str(module.weight.dtype)}
    return ", ".join(sorted(found))


@jax.jit
def _compared(model: jspec.Llama, other: jspec.Llama, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the divergence ``[B, S]`` of the next token's distributions, and whether the most likely is the same."""
    first, second = model(tokens), other(tokens)
    logs = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
    divergence = (jnp.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1)
    return divergence, first.argmax(axis=-1) == second.argmax(axis=-1)


def _distance(model: jspec.Llama, other: jspec.Llama, texts: np.ndarray) -> dict[str, float]:
    found: Any = [_compared(model, other, texts[i : i + _BATCH]) for i in range(0, len(texts), _BATCH)]
    divergence, same = (np.concatenate(list(map(np.asarray, part))) for part in zip(*found, strict=True))
    return {"KL": float(divergence.mean(dtype=np.float64)), "greedy": float(same.mean())}


def _accepted(subject: Subject, draft: jspec.Llama, batch: int) -> float:
    options: Any = {"max_new_tokens": NEW_TOKENS, "num_draft_tokens": K}
    return acceptance_rate(jspec.speculative_generate(subject.target, draft, *subject.request(batch, WIDTH), **options))
