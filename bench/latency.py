"""Tokens per second of whole calls, in turns: plain, speculative for each K (with the prediction), and transformers."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots, rivals
from bench.acceptance import acceptance_rate
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.subject import Request, Subject, span
from bench.synthetic import Synthetic
from bench.timing import in_turns, ratio, spread
from jspec import theory

DRAFTING = ("K", "tokens per round", "acceptance", "cost ratio", "predicted", "with K + 1 rows")


def decoders(
    subject: Subject, request: Request, new_tokens: int, temperature: float, ks: list[int], accept: Any
) -> dict[str, Callable[[], Any]]:
    """Return name -> a jspec call on all rows: plain, and speculative with each K."""
    target, draft = subject.target, subject.draft
    options = {"max_new_tokens": new_tokens, "sampling": jspec.SamplingParams(temperature=temperature)}
    calls: dict[str, Callable[[], Any]] = {"plain": lambda: jspec.generate(target, *request, **options)}
    for k in ks:
        calls[f"speculative K={k}"] = lambda k=k: jspec.speculative_generate(
            target, draft, *request, num_draft_tokens=k, accept=accept, **options
        )
    return calls


def run(
    subject: Subject,
    batches: list[int],
    ks: list[int],
    new_tokens: int,
    width: int,
    temperature: float,
    repeats: int,
    with_rivals: bool,
    acceptance: float | None,
) -> None:
    """Measure every batch size and publish one table."""
    models = subject.target, subject.draft
    with_rivals = with_rivals and importlib.util.find_spec("torch") is not None and all(map(rivals.has_twin, models))
    others = [rivals.twin(model) for model in models] if with_rivals else None
    accept = "rejection" if acceptance is None else Synthetic((acceptance,))
    kind = "" if acceptance is None else f", {accept}"
    rows = []
    for batch in batches:
        request = tokens, lengths, _ = subject.request(batch, width)
        calls = decoders(subject, request, new_tokens, temperature, ks, accept)
        if others:
            rows_ = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
            calls["transformers plain"] = rivals.decoder(others[0], None, rows_, new_tokens, temperature, 0)
            calls["transformers assisted"] = rivals.decoder(*others, rows_, new_tokens, temperature, 4)
        size = batch, int(lengths.mean()) + new_tokens // 2, tokens.shape[1] + new_tokens + max(ks) + 1
        alone = {f"{n} rows": Pass(subject.target, n, *size) for n in (1, *(k + 1 for k in ks))}
        alone |= subject.draft_passes({"draft": 1}, *size)
        times = in_turns(calls | alone, repeats)
        taken = pass_seconds(alone, times)
        rows += _rows(batch, batch * new_tokens, calls, times, {name: t / taken["1 rows"] for name, t in taken.items()})
    publish(
        f"latency-{subject.name}{kind}-t{temperature:g}-{jax.default_backend()}",
        f"{subject.name}{kind}: {new_tokens} new tokens after {span(lengths)}, temperature {temperature:g},"
        f" {subject.target.dtype}",
        rows,
        plots.speedups,
        notes=[
            f"Medians of {repeats} calls in turns, prompt included; from and to: quartiles of x own plain."
            " transformers assisted decodes one row after another, with K = 4.",
            "acceptance: the share of verified draft tokens that were accepted; a missing one counts as rejected. cost"
            " ratio: the time of a draft pass over that of a target pass, each over one row and measured alone."
            " predicted: the speed-up by Leviathan et al. 2023, theorem 3.8; with K + 1 rows: the same, but with the"
            " time to verify K + 1 rows, measured alone. Prompt lookup counts as free.",
        ],
        folder=subject.folder,
    )


def _rows(
    batch: int, count: int, calls: dict[str, Callable[[], Any]], times: dict[str, np.ndarray], costs: dict[str, float]
) -> list[dict[str, Any]]:
    """Return one table row per decoder."""
    rows = []
    for name, call in calls.items():
        row = {"batch": batch, "decoder": name, "tokens/s": spread(count / times[name]).median}
        row |= _drafting(call(), count, costs) if name.startswith("speculative") else dict.fromkeys(DRAFTING, "")
        gain = ratio(times["plain"], times[name])
        row |= {"x own plain": gain.median, "from": gain.low, "to": gain.high}
        for rival in ("transformers plain", "transformers assisted"):
            row[f"x {rival}"] = ratio(times[rival], times[name]).median if rival in times else ""
        rows.append(row)
    return rows


def _drafting(out: jspec.Output, count: int, costs: dict[str, float]) -> dict[str, Any]:
    """Return a speculative call's statistics, and the speed-up predicted from acceptance and relative pass costs."""
    alpha, k, c = acceptance_rate(out), out.stats.accepted_at.shape[1], costs.get("draft", 0.0)
    predicted = float(theory.speedup(alpha, k, c))
    dearer = predicted * (k * c + 1) / (k * c + costs[f"{k + 1} rows"])
    figures = (k, count / int(np.sum(out.stats.rounds)), alpha, c, predicted, dearer)
    return dict(zip(DRAFTING, figures, strict=True))
