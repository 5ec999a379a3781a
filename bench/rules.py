"""Tokens per round (not times) under the three exact rules, for several drafters, draft lengths and temperatures."""

from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.drafters import early_exit, made
from bench.report import publish
from bench.subject import WIDTH, Subject, span

DRAFTERS = ("draft model", "bigram", "retrieval")
RULES = ("rejection", "block", "coupled")


def run(subject: Subject, batch: int, ks: list[int], new_tokens: int, temperatures: list[float]) -> None:
    """Publish one row per drafter, K and temperature. All rules continue the same prompts with the same keys."""
    target, found = subject.target, made(subject)
    drafters = {name: found[name] for name in DRAFTERS if name in found} | early_exit(target)
    request = _, lengths, _ = subject.request(batch, WIDTH)
    rows = []
    for temperature in temperatures:
        for name, drafter in drafters.items():
            for k in ks:
                options = {
                    "max_new_tokens": new_tokens,
                    "num_draft_tokens": k,
                    "sampling": jspec.SamplingParams(temperature=temperature),
                }
                yields = {
                    rule: _yields(jspec.speculative_generate(target, drafter, *request, accept=rule, **options))
                    for rule in RULES
                }
                rows.append({"drafter": name, "K": k, "temperature": temperature} | _compared(yields))
    publish(
        f"rules-{subject.name}-b{batch}-{jax.default_backend()}",
        f"{subject.name}: {len(lengths)} prompts of {span(lengths)} tokens, {new_tokens} new tokens each,"
        f" {target.dtype}",
        rows,
        plots.rules,
        notes=[
            "Tokens per round. block - rejection: mean over prompts of the difference, and its standard error. k-seq"
            " equals rejection for chains such as these; `python -m bench trees` measures it."
        ],
        folder=subject.folder,
    )


def _yields(out: jspec.Output) -> np.ndarray:
    """Return the tokens per round of each request, ``float64[B]``."""
    return np.asarray(out.lengths, float) / np.asarray(out.stats.rounds)


def _compared(yields: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the mean for each rule, and the significance of block's lead over rejection."""
    lead = yields["block"] - yields["rejection"]
    error = lead.std(ddof=1) / lead.size**0.5
    return {rule: float(mean.mean()) for rule, mean in yields.items()} | {
        "block - rejection": float(lead.mean()),
        "standard error": float(error),
    }
