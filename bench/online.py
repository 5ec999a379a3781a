"""Online learning: acceptance request by request in a domain that the drafter was not trained on."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import typer

import jspec
from bench import plots
from bench.losses import STEP_TOKENS, windows
from bench.report import publish
from bench.subject import Subject, ragged
from jspec import text
from jspec.cli.report import training_line
from jspec.training.batches import Plan
from jspec.training.dataset import Row
from jspec.training.fit import Progress, Schedule, Source, fit
from jspec.training.kinds import KINDS, trainee_of
from pair.corpus import Document, load_corpus

_PROMPT = 64


def run(subject: Subject, kind: str, steps: int, requests: int, batch: int, new_tokens: int, rate: float) -> None:
    """Train on Python's library without its unit tests, then decode unit tests with and without learning."""
    target, tokenizer = subject.target, subject.tokenizer
    train, held_out = load_corpus()
    library = windows(tokenizer, [one for one in train if not _is_test(one)])
    prompts = [ids for one in held_out + train if _is_test(one) for ids in _starts(tokenizer, one)]
    prompts = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts))[: requests * batch]]
    drafter = _trained(target, kind, library, steps)
    served = {
        "as it was": _served(subject, drafter, prompts, batch, new_tokens, None),
        "learning": _served(subject, drafter, prompts, batch, new_tokens, rate),
    }
    rows = [
        {"tokens served": (number + 1) * batch * new_tokens} | {name: rates[number] for name, rates in served.items()}
        for number in range(len(prompts) // batch)
    ]
    publish(
        f"online-{subject.name}-{kind}",
        f"{kind} for {subject.name}, trained without unit tests, serves unit tests",
        rows,
        plots.online,
        notes=[
            "Share of verified draft tokens that are accepted at temperature 1, K = 3, request by request, with the"
            f" same keys; one learning step per request of {batch} texts."
        ],
        folder=subject.folder,
        kind=kind,
        steps=steps,
        rate=rate,
        **{f"last quarter, {name}": float(np.mean(rates[-max(1, requests // 4) :])) for name, rates in served.items()},
    )


def _is_test(one: Document) -> bool:
    return "test" in Path(one.path).parts


def _starts(tokenizer: Any, one: Document) -> list[list[int]]:
    """Return one prompt from the middle of a module if it is long, or an empty list."""
    ids = tokenizer(one.text, verbose=False)["input_ids"]
    return [ids[len(ids) // 2 :][:_PROMPT]] if len(ids) > 4 * _PROMPT else []


def _trained(target: jspec.Llama, kind: str, rows: list[Row], steps: int) -> Any:
    trainee = trainee_of(KINDS[kind](target, None, 3, 0))
    source, held_out = Source(Plan(rows[:-16], STEP_TOKENS, 0)), Source(Plan(rows[-16:], STEP_TOKENS, 0))
    with tempfile.TemporaryDirectory() as folder:
        weights = fit(trainee, target, source, held_out, Schedule(steps, 3), Path(folder), _show_looks)
    return trainee.drafter(weights)


def _show_looks(news: Progress | int) -> None:
    if not isinstance(news, int):
        typer.echo(training_line(news), err=True)


def _served(
    subject: Subject, drafter: Any, prompts: list[list[int]], batch: int, new_tokens: int, rate: float | None
) -> list[float]:
    """Return the acceptance rate of each batch of requests. If `rate` is given, the drafter learns from each batch."""
    length, accepted = _PROMPT + new_tokens, []
    learner = None
    if rate is not None:
        learner = jspec.online.Learner(subject.target, drafter, rate=rate, depth=3, batch=batch, length=length)
    for number, start in enumerate(range(0, len(prompts) - batch + 1, batch)):
        asked = prompts[start : start + batch]
        tokens, lengths, _ = ragged(asked)
        out = jspec.speculative_generate(
            subject.target,
            learner.drafter if learner else drafter,
            tokens,
            lengths,
            text.request_keys(number, batch),
            max_new_tokens=new_tokens,
            num_draft_tokens=3,
        )
        accepted.append(float(out.stats.accepted.sum() / out.stats.judged.sum()))
        if learner:
            learner.learn(asked, out)
    return accepted
