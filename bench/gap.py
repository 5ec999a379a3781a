"""The speed-up predicted from acceptance and cost ratio, the measured speed-up, and the causes of the difference."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec
from bench import plots
from bench.acceptance import acceptance_rate
from bench.passes import Pass, pass_seconds
from bench.report import publish
from bench.subject import Subject
from bench.synthetic import Synthetic
from bench.timing import in_turns, spread
from jspec import theory


class Calls:
    """One program, called with a long and a short limit. The difference of their times excludes the prefill.

    Raises:
        ValueError: both limits take the same number of rounds, so there is no difference.
    """

    def __init__(self, decode: Callable[..., jspec.Output], limits: tuple[int, int], temperature: float):
        def call(limit: int) -> jspec.Output:
            return decode(
                max_new_tokens=limits[1], sampling=jspec.SamplingParams(temperature=temperature, max_tokens=limit)
            )

        self.both = {"short": lambda: call(limits[0]), "long": lambda: call(limits[1])}
        self.out = call(limits[1])
        rounds = [int(np.max(call(limit).stats.rounds)) for limit in limits]
        self.rounds = rounds[1] - rounds[0]
        if self.rounds == 0:
            raise ValueError(
                f"{limits[0]} and {limits[1]} new tokens both take {rounds[0]} rounds, but the time of a round is "
                "computed from a difference; raise --max-new-tokens."
            )

    def round_seconds(self, times: dict[str, Any], name: str) -> float:
        """Return the seconds per round, from readings of ``name short`` and ``name long``."""
        return spread(times[f"{name} long"] - times[f"{name} short"]).median / self.rounds


def run(
    subject: Subject, k: int, batch: int, temperature: float, repeats: int, new_tokens: int, acceptance: float | None
) -> None:
    """Measure passes and rounds in turns, and publish the steps from the predicted to the measured speed-up."""
    target, draft = subject.target, subject.draft
    request = tokens, lengths, _ = subject.request(batch, 32)
    limits = (max(1, new_tokens // 8), new_tokens)
    accept = "rejection" if acceptance is None else Synthetic((acceptance,))
    plain = Calls(lambda **options: jspec.generate(target, *request, **options), limits, temperature)
    speculative = Calls(
        lambda **options: jspec.speculative_generate(
            target, draft, *request, num_draft_tokens=k, accept=accept, **options
        ),
        limits,
        temperature,
    )
    size = batch, int(lengths.mean()) + new_tokens // 2, tokens.shape[1] + new_tokens + k + 1
    passes = {"target": Pass(target, 1, *size), "verify": Pass(target, k + 1, *size)}
    first = (
        1 if isinstance(draft, jspec.EarlyExitDrafter) else 2
    )  # an exit shares the target's cache except for one token
    passes |= subject.draft_passes({"draft": 1, "draft 2 rows": first}, *size)
    calls = {
        f"{name} {length}": call
        for name, both in (("plain", plain), ("speculative", speculative))
        for length, call in both.both.items()
    }
    times = in_turns(calls | passes, repeats)
    free = {"draft": 0.0, "draft 2 rows": 0.0}  # the loop includes the cost of lookup
    cost = (
        free
        | pass_seconds(passes, times)
        | {"plain": plain.round_seconds(times, "plain"), "round": speculative.round_seconds(times, "speculative")}
    )
    whole = spread(times["plain long"] / times["speculative long"]).median
    alpha = acceptance_rate(speculative.out)
    name = subject.name + ("" if acceptance is None else f", {accept}")
    publish(
        f"gap-{name}-k{k}-b{batch}-t{temperature:g}-{jax.default_backend()}",
        f"{name}: from the predicted speed-up to the measured one, K = {k}, batch {batch}, temperature {temperature:g},"
        f" {target.dtype}",
        steps(k, alpha, cost, np.asarray(speculative.out.stats.rounds), new_tokens, whole),
        plots.bars("step", "speed-up"),
        notes=[
            f"Theory: Leviathan et al. 2023, theorem 3.8, if {alpha:.3f} of the verified draft tokens are accepted"
            f" (a missing one counts as rejected) and the cost ratio is {cost['draft'] / cost['target']:.3f}. A round"
            f" takes {cost['round'] / _alone(k, cost):.3f} times as long as its passes measured alone."
        ],
        folder=subject.folder,
        seconds=cost,
    )


def steps(
    k: int, alpha: float, cost: dict[str, float], rounds: np.ndarray, new_tokens: int, whole: float
) -> list[dict[str, Any]]:
    """Return the steps from the theory's speed-up to that of whole calls, each with the round that it assumes.

    Args:
        k: the number of draft tokens per round.
        alpha: the share of verified draft tokens that were accepted.
        cost: the seconds of the passes "target", "verify", "draft" and "draft 2 rows", of a "round", and of one step
            of "plain" decoding.
        rounds: ``int32[B]``, the number of rounds in which each row generated its `new_tokens`.
        whole: the measured speed-up of whole calls.
    """
    predicted = float(theory.expected_tokens(alpha, k))
    each, together = new_tokens / float(rounds.mean()), new_tokens / int(rounds.max())
    ideal = cost["target"] + k * cost["draft"]
    found = [
        ("theory: K drafts, one target pass, independent acceptance", predicted, cost["target"], ideal),
        ("acceptance is not independent, and the end of the text cuts rounds", each, cost["target"], ideal),
        (f"verifying {k + 1} rows costs more than 1", each, cost["target"], ideal - cost["target"] + cost["verify"]),
        ("the first draft step reads two tokens", each, cost["target"], _alone(k, cost)),
        ("sampling, acceptance, loop: of the round", each, cost["target"], cost["round"]),
        ("... and of plain decoding", each, cost["plain"], cost["round"]),
        ("rows wait for the slowest", together, cost["plain"], cost["round"]),
    ]
    rows = [
        {
            "step": step,
            "tokens per round": tokens,
            "plain, ms per token": plain * 1e3,
            "ms per round": spent * 1e3,
            "speed-up": tokens * plain / spent,
        }
        for step, tokens, plain, spent in found
    ]
    return [*rows, rows[-1] | {"step": "whole calls, with the prompt", "speed-up": whole}]


def _alone(k: int, cost: dict[str, float]) -> float:
    """Return the seconds of a round's passes, each measured alone."""
    return cost["verify"] + (k - 1) * cost["draft"] + cost["draft 2 rows"]
