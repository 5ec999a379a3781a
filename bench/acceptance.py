"""True acceptance of the bundled pair, by position in the draft, kind of prompt and temperature, beside the theory."""

from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from jspec import theory
from jspec.tuning import acceptance_rates
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


def measured_rates(out: jspec.Output) -> np.ndarray:
    """``float64[K]``: how often draft k was accepted when it was judged. Only limits may have ended the texts."""
    return acceptance_rates([jax.device_get(out)])


def overall(rates: np.ndarray) -> float:
    """Drafts accepted over drafts judged: what one number says best about all positions."""
    survived = np.cumprod(rates)
    return float(survived.sum() / (1 + survived[:-1].sum()))


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
            rows.append({"prompt": kind, "temperature": temperature} | _figures(measured_rates(out)))
    publish(
        f"acceptance-k{k}-b{batch}-{jax.default_backend()}",
        f"bundled pair: {size} prompts of {WIDTH} tokens, {new_tokens} new tokens each, K = {k}, {target.dtype}",
        rows,
        plots.acceptance,
        notes=["after n: share of drafts accepted at position n + 1 of those whose n predecessors were accepted."
               " theory: tokens a round if acceptance were independent (Leviathan et al. 2023, equation 1)."],
    )  # fmt: skip


def _figures(rates: np.ndarray) -> dict[str, Any]:
    """Conditional acceptance by position, and tokens a round for two lengths, measured and predicted."""
    row: dict[str, Any] = {f"after {n}": float(rate) for n, rate in enumerate(rates)}
    row["acceptance"] = alpha = overall(rates)
    for length in (min(4, rates.size), rates.size):
        row[f"tokens in the first {length} + 1"] = float(theory.expected_tokens_from_rates(rates[:length]))
        row[f"theory, {length} + 1"] = float(theory.expected_tokens(alpha, length))
    return row
