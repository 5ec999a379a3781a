"""The speed-up that the theory gives for the tokens of a round, the one that is measured, and where the rest goes."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import pairs
from bench.latency import find_prompts
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.synthetic import synthetic
from bench.timing import in_turns, spread
from jspec.types import CORRECTED


class Calls:
    """One program called with a long and a short limit: the difference is decoding alone, without the prompt."""

    def __init__(self, decode: Callable[..., jspec.Output], limits: tuple[int, int], temperature: float):
        def call(limit: int) -> jspec.Output:
            return decode(
                max_new_tokens=limits[1], sampling=jspec.SamplingParams(temperature=temperature, max_tokens=limit)
            )

        self.both = {"short": lambda: call(limits[0]), "long": lambda: call(limits[1])}
        self.out = call(limits[1])
        rounds = [int(np.max(call(limit).stats.rounds)) for limit in limits]
        self.rounds = rounds[1] - rounds[0]

    def round_seconds(self, times: dict[str, Any], name: str) -> float:
        """Seconds a round, from readings of ``name short`` and ``name long``."""
        return spread(times[f"{name} long"] - times[f"{name} short"]).median / self.rounds


def run(pair: str, k: int, batch: int, temperature: float, repeats: int, new_tokens: int,
        acceptance: float | None) -> None:  # fmt: skip
    """Measure passes and rounds in turns, and publish the way from the one speed-up to the other."""
    target, draft = pairs.pair(pair)
    tokens = find_prompts(pair, target, batch, 32)
    request = (tokens, np.full(batch, 32), jax.random.split(jax.random.key(0), batch))
    limits = (max(1, new_tokens // 8), new_tokens)
    accept = "rejection" if acceptance is None else synthetic(acceptance)
    plain = Calls(lambda **options: jspec.generate(target, *request, **options), limits, temperature)
    speculative = Calls(
        lambda **options: jspec.speculative_generate(
            target, draft, *request, num_draft_tokens=k, accept=accept, **options
        ),
        limits,
        temperature,
    )
    slots = 32 + new_tokens + k + 1
    passes = {name: Pass(model, rows, batch, 32 + new_tokens // 2, slots) for name, model, rows in (
        ("target", target, 1), ("verify", target, k + 1), ("draft", draft, 1), ("draft 2 rows", draft, 2))}  # fmt: skip
    calls = {f"{name} {length}": call for name, both in (("plain", plain), ("speculative", speculative))
             for length, call in both.both.items()}  # fmt: skip
    times = in_turns(calls | passes, repeats)
    cost = pass_seconds(passes, times) | {"plain": plain.round_seconds(times, "plain"),
                                          "round": speculative.round_seconds(times, "speculative")}  # fmt: skip
    whole = spread(times["plain long"] / times["speculative long"]).median
    pair += "" if acceptance is None else f", {accept}"
    _publish(pair, k, batch, temperature, cost, speculative.out, new_tokens, whole)


def _publish(
    pair: str,
    k: int,
    batch: int,
    temperature: float,
    cost: dict[str, float],
    out: jspec.Output,
    new_tokens: int,
    whole: float,
) -> None:
    """The steps from the theory's speed-up to that of whole calls, each with the time of a round that it supposes."""
    rounds = np.asarray(out.stats.rounds)
    accepted, corrected = int(np.sum(out.stats.accepted)), int(np.sum(out.origins == CORRECTED))
    each = batch * new_tokens / int(rounds.sum())
    together = new_tokens / int(rounds.max())
    theory = cost["target"] + k * cost["draft"]
    alone = cost["verify"] + (k - 1) * cost["draft"] + cost["draft 2 rows"]
    steps = [
        ("theory: K drafts and one target pass", each, cost["target"], theory),
        (f"verifying {k + 1} rows costs more than 1", each, cost["target"], theory - cost["target"] + cost["verify"]),
        ("the first draft step reads two tokens", each, cost["target"], alone),
        ("sampling, acceptance, loop: of the round", each, cost["target"], cost["round"]),
        ("... and of plain decoding", each, cost["plain"], cost["round"]),
        ("rows wait for the slowest", together, cost["plain"], cost["round"]),
    ]
    rows = [{"step": name, "tokens a round": tokens, "plain, ms a token": plain * 1e3, "ms a round": spent * 1e3,
             "speed-up": tokens * plain / spent} for name, tokens, plain, spent in steps]  # fmt: skip
    rows.append(rows[-1] | {"step": "whole calls, with the prompt", "speed-up": whole})
    publish(
        f"gap-{pair}-k{k}-b{batch}-t{temperature:g}-{jax.default_backend()}",
        f"{pair}: from the predicted speed-up to the measured, K = {k}, batch {batch}, temperature {temperature:g}",
        rows,
        notes=[
            f"Cost ratio {cost['draft'] / cost['target']:.3f}; a round takes {cost['round'] / alone:.3f} of its passes"
            " measured alone. Accepted: "
            f"{accepted / (accepted + corrected):.3f} of the drafts that were judged."
        ],
        seconds=cost,
    )
