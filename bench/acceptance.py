"""True acceptance of the bundled pair, by position in the draft, kind of prompt and temperature, beside the theory."""

from typing import Any

import jax
import numpy as np

import jspec
from bench.report import publish
from jspec import theory
from pair.corpus import load_corpus

WIDTH = 96


def held_out(tokenizer: Any, batch: int) -> dict[str, np.ndarray]:
    """Kind of prompt -> ``int32[batch, WIDTH]``, from modules neither model was trained on."""
    rows = [tokenizer.encode(document.text) for document in load_corpus()[1]]
    rows = [row for row in rows if len(row) >= 8 * WIDTH]
    rows = rows[:: max(1, len(rows) // batch)][:batch]
    middles = [row[len(row) // 2 :][:WIDTH] for row in rows]
    return {"start of a module": np.array([row[:WIDTH] for row in rows], np.int32),
            "inside a module": np.array(middles, np.int32)}  # fmt: skip


def survival(out: jspec.Output) -> np.ndarray:
    """Share of rounds in which the first 1, 2, ... K drafts were all accepted."""
    return np.asarray(out.stats.accepted_at).sum(0) / np.asarray(out.stats.rounds).sum()


def run(batch: int, k: int, new_tokens: int, temperatures: list[float]) -> None:
    """Publish one row for each kind of prompt and temperature."""
    target, draft, tokenizer = jspec.demo_pair()
    rows = []
    for kind, tokens in held_out(tokenizer, batch).items():
        size = len(tokens)
        request = (tokens, np.full(size, WIDTH), jax.random.split(jax.random.key(0), size))
        for temperature in temperatures:
            sampling = jspec.SamplingParams(temperature=temperature)
            out = jspec.speculative_generate(
                target, draft, *request, max_new_tokens=new_tokens, num_draft_tokens=k, sampling=sampling
            )
            rows.append({"prompt": kind, "temperature": temperature} | _figures(survival(out), k))
    publish(
        f"acceptance-{jax.default_backend()}",
        f"bundled pair: {size} prompts of {WIDTH} tokens, {new_tokens} new tokens each, K = {k}",
        rows,
        notes=["after n: share of drafts accepted at position n + 1 of those whose n predecessors were accepted."
               " theory: tokens a round if acceptance were independent (Leviathan et al. 2023, equation 1)."],
    )  # fmt: skip


def _figures(survived: np.ndarray, k: int) -> dict[str, Any]:
    """Conditional acceptance by position, and tokens a round for two lengths, measured and predicted."""
    conditional = survived / np.append(1.0, survived[:-1])
    row: dict[str, Any] = {f"after {n}": float(conditional[n]) for n in range(0, k, max(1, k // 4))}
    # Judged drafts accepted, over judged drafts: what one number says best about all positions.
    rate = float(survived.sum() / (1 + survived[:-1].sum()))
    row["acceptance"] = rate
    for length in (min(4, k), k):
        row[f"tokens in the first {length} + 1"] = 1 + float(survived[:length].sum())
        row[f"theory, {length} + 1"] = float(theory.expected_tokens(rate, length))
    return row
