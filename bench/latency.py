"""Tokens a second of whole calls: plain, speculative over K beside the theory, and transformers, in turns."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import pairs, plots, rivals
from bench.acceptance import held_out, measured_rates, overall
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.synthetic import Synthetic
from bench.timing import in_turns, ratio, spread
from jspec import theory

DRAFTING = ("K", "tokens a round", "acceptance", "cost ratio", "predicted", "with K + 1 rows")


def prompts(vocab_size: int, batch: int, width: int) -> np.ndarray:
    """Random tokens ``int32[batch, width]``: cost does not depend on them."""
    return np.random.default_rng(0).integers(1, vocab_size, (batch, width)).astype(np.int32)


def bundled_prompts(batch: int, width: int) -> np.ndarray:
    """`width` tokens from inside of each of `batch` modules that the pair was not trained on."""
    return held_out(jspec.demo_pair()[2], batch)["inside a module"][:, -width:]


def find_prompts(pair: str, target: jspec.Llama, batch: int, width: int) -> np.ndarray:
    """Prompts ``int32[batch, width]`` that suit the pair."""
    return (
        bundled_prompts(batch, width)
        if pair.removesuffix(":int8") == "bundled"
        else prompts(target.config.vocab_size, batch, width)
    )


def decoders(
    models: tuple[jspec.Llama, jspec.Llama],
    tokens: np.ndarray,
    new_tokens: int,
    temperature: float,
    ks: list[int],
    accept: Any,
) -> dict[str, Callable[[], Any]]:
    """Name -> a call of jspec on all rows: plain, and speculative with every K."""
    target, draft = models
    batch, width = tokens.shape
    request = (tokens, np.full(batch, width), jax.random.split(jax.random.key(0), batch))
    options = {"max_new_tokens": new_tokens, "sampling": jspec.SamplingParams(temperature=temperature)}
    calls: dict[str, Callable[[], Any]] = {"plain": lambda: jspec.generate(target, *request, **options)}
    for k in ks:
        calls[f"speculative K={k}"] = lambda k=k: jspec.speculative_generate(
            target, draft, *request, num_draft_tokens=k, accept=accept, **options
        )
    return calls


def run(pair: str, batches: list[int], ks: list[int], new_tokens: int, width: int, temperature: float, repeats: int,
        with_rivals: bool, acceptance: float | None) -> None:  # fmt: skip
    """Measure every batch size and publish one table."""
    models = pairs.pair(pair)
    # The rivals have no int8 weights.
    with_rivals = with_rivals and importlib.util.find_spec("torch") is not None and not pair.endswith(":int8")
    others = [rivals.twin(model) for model in models] if with_rivals else None
    accept = "rejection" if acceptance is None else Synthetic(acceptance)
    kind = "" if acceptance is None else f", {accept}"
    rows = []
    for batch in batches:
        tokens = find_prompts(pair, models[0], batch, width)
        calls = decoders(models, tokens, new_tokens, temperature, ks, accept)
        if others:
            calls["transformers plain"] = rivals.decoder(others[0], None, tokens, new_tokens, temperature, 0)
            calls["transformers assisted"] = rivals.decoder(*others, tokens, new_tokens, temperature, 4)
        slots = width + new_tokens + max(ks) + 1
        alone = {
            f"{n} rows": Pass(models[0], n, batch, width + new_tokens // 2, slots) for n in (1, *(k + 1 for k in ks))
        }
        alone["draft"] = Pass(models[1], 1, batch, width + new_tokens // 2, slots)
        times = in_turns(calls | alone, repeats)
        taken = pass_seconds(alone, times)
        rows += _rows(batch, batch * new_tokens, calls, times, {name: t / taken["1 rows"] for name, t in taken.items()})
    publish(
        f"latency-{pair}{kind}-t{temperature:g}-{jax.default_backend()}",
        f"{pair}{kind}: {new_tokens} new tokens after {width}, temperature {temperature:g}, {models[0].dtype}",
        rows,
        plots.speedups,
        notes=[f"Medians of {repeats} calls in turns, prompt included; from and to: quartiles of x own plain."
               " transformers assisted: K = 4, rows one after another.",
               "acceptance: of the judged drafts. cost ratio: draft over target, one pass of one row alone."
               " predicted: their speed-up by Leviathan et al. 2023, theorem 3.8; with K + 1 rows: with what verifying"
               " as many takes, measured alone, in the place of one row's time."],
    )  # fmt: skip


def _rows(
    batch: int, count: int, calls: dict[str, Callable[[], Any]], times: dict[str, np.ndarray], costs: dict[str, float]
) -> list[dict[str, Any]]:
    """One table row a decoder."""
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
    """What a call with drafts did, and the speed-up that follows from acceptance and from costs over one row's pass."""
    rates = measured_rates(out)
    alpha, k, c = overall(rates), rates.size, costs["draft"]
    predicted = float(theory.speedup(alpha, k, c))
    dearer = predicted * (k * c + 1) / (k * c + costs[f"{k + 1} rows"])
    figures = (k, count / int(np.sum(out.stats.rounds)), alpha, c, predicted, dearer)
    return dict(zip(DRAFTING, figures, strict=True))
