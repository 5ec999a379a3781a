"""Tokens a round under the three exact rules, for several drafters, draft lengths and temperatures; no times."""

from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.acceptance import WIDTH, held_out
from bench.drafters import made
from bench.report import publish

DRAFTERS = ("draft model", "bigram", "retrieval", "first 4 of 6 layers")
RULES = ("rejection", "block", "coupled")


def run(batch: int, ks: list[int], new_tokens: int, temperatures: list[float]) -> None:
    """Publish one row a drafter, K and temperature; all rules continue the same prompts with the same keys."""
    target, draft, tokenizer = jspec.demo_pair()
    drafters, tokens = made(draft, tokenizer), held_out(tokenizer, batch)["inside a module"]
    request = tokens, np.full(len(tokens), WIDTH), jax.random.split(jax.random.key(0), len(tokens))
    rows = []
    for temperature in temperatures:
        for name in DRAFTERS:
            for k in ks:
                options = {"max_new_tokens": new_tokens, "num_draft_tokens": k,
                           "sampling": jspec.SamplingParams(temperature=temperature)}  # fmt: skip
                yields = {rule: _yields(jspec.speculative_generate(target, drafters[name], *request, accept=rule,
                                                                   **options)) for rule in RULES}  # fmt: skip
                rows.append({"drafter": name, "K": k, "temperature": temperature} | _compared(yields))
    publish(
        f"rules-b{batch}-{jax.default_backend()}",
        f"bundled pair: {len(tokens)} prompts of {WIDTH} tokens, {new_tokens} new tokens each, {target.dtype}",
        rows,
        plots.rules,
        notes=["Tokens a round. block - rejection: mean over prompts of the difference, and its standard error."],
    )


def _yields(out: jspec.Output) -> np.ndarray:
    """Tokens a round of each request, ``float64[B]``."""
    return np.asarray(out.lengths, float) / np.asarray(out.stats.rounds)


def _compared(yields: dict[str, np.ndarray]) -> dict[str, Any]:
    """Means of the rules, and how sure block's lead over rejection is."""
    lead = yields["block"] - yields["rejection"]
    error = lead.std(ddof=1) / lead.size**0.5
    return {rule: float(mean.mean()) for rule, mean in yields.items()} | {
        "block - rejection": float(lead.mean()), "standard error": float(error)}  # fmt: skip
