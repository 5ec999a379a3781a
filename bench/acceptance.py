"""True acceptance rate by draft position, prompt kind and temperature, compared with theory."""

from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject, span
from jspec import theory
from jspec.tuning.tune_chain import acceptance_rates


def acceptance_rate(out: jspec.Output) -> float:
    """Return the share of verified draft tokens that were accepted, over all rows.

    A missing draft token counts as rejected, because alpha is defined for rounds that always have K draft tokens. The
    rows must have ended only at length limits.
    """
    survived = np.cumprod(acceptance_rates([jax.device_get(out)]))
    return float(survived.sum() / (1 + survived[:-1].sum()))


def run(subject: Subject, batch: int, k: int, new_tokens: int, temperatures: list[float]) -> None:
    """Publish one row for each prompt kind and temperature."""
    models, rows = (subject.target, subject.draft), []
    for kind, request in subject.kinds(batch).items():
        for temperature in temperatures:
            sampling = jspec.SamplingParams(temperature=temperature)
            out = jspec.speculative_generate(
                *models, *request, max_new_tokens=new_tokens, num_draft_tokens=k, sampling=sampling
            )
            rows.append({"prompt": kind, "temperature": temperature} | _figures(jax.device_get(out)))
    lengths = request[1]
    publish(
        f"acceptance-{subject.name}-k{k}-b{batch}-{jax.default_backend()}",
        f"{subject.name}: {len(lengths)} prompts of {span(lengths)} tokens, {new_tokens} new tokens each, K = {k},"
        f" {subject.target.dtype}",
        rows,
        plots.acceptance,
        notes=[
            "after n: of the drafts whose first n tokens were accepted, the share in which token n + 1 was accepted."
            " theory: tokens per round if acceptance were independent (Leviathan et al. 2023, equation 1)."
        ],
        folder=subject.folder,
    )


def _figures(out: jspec.Output) -> dict[str, Any]:
    """Return conditional acceptance by position, and measured and predicted tokens per round for two lengths."""
    rates, alpha = acceptance_rates([out]), acceptance_rate(out)
    row: dict[str, Any] = {f"after {n}": float(rate) for n, rate in enumerate(rates)} | {"acceptance": alpha}
    for length in (min(4, rates.size), rates.size):
        row[f"tokens in the first {length} + 1"] = float(theory.expected_tokens_from_rates(rates[:length]))
        row[f"theory, {length} + 1"] = float(theory.expected_tokens(alpha, length))
    return row
