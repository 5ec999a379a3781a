"""Compare losses: train the same drafter with each loss, from several seeds, for the same number of steps."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import typer

import jspec
from bench import plots
from bench.report import publish
from bench.subject import Subject
from jspec.training.batches import Plan
from jspec.training.dataset import Row, of_answer, parts
from jspec.training.fit import Schedule, Source, fit, predicted, read_log
from jspec.training.kinds import KINDS, Trainee, trainee_of
from jspec.training.losses import LOSSES
from jspec.training.target_states import StoredStates
from pair.corpus import load_corpus

LENGTH, STEP_TOKENS = 256, 4096
_HELD_OUT = 128


def run(subject: Subject, kind: str, texts: int, steps: int, depth: int, seeds: int) -> None:
    """Train on Python source, and publish the drafter's acceptance on held-out modules."""
    target = subject.target
    train, held_out = (windows(subject.tokenizer, side) for side in load_corpus())
    spread = np.random.default_rng(0)
    train = [train[i] for i in spread.permutation(len(train))[:texts]]
    held_out = [held_out[i] for i in spread.permutation(len(held_out))[:_HELD_OUT]]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainees = [trainee_of(KINDS[kind](target, None, depth, seed)) for seed in range(seeds)]
        known, asked = (
            _source(target, side, trainees[0], Path(folder) / name)
            for side, name in ((train, "train"), (held_out, "held out"))
        )
        # A seed also sets the data order, because a draft model starts from the target's layers with every seed.
        orders = [dataclasses.replace(known, plan=Plan(train, STEP_TOKENS, seed)) for seed in range(seeds)]
        for loss in LOSSES:
            found = [
                _trained(target, one, [order, asked], Schedule(steps, depth, loss), Path(folder) / f"{loss}-{seed}")
                for seed, (one, order) in enumerate(zip(trainees, orders, strict=True))
            ]
            rows.append({"loss": loss} | _summary(found))
    publish(
        f"losses-{subject.name}-{kind}",
        f"{kind} for {subject.name}: {steps} steps of {STEP_TOKENS} tokens with every loss, {seeds} seeds",
        rows,
        plots.bars("loss", "accepted"),
        notes=[
            "accepted: sum min(p, q) of the first draft token at temperature 1, on held-out modules; greedy: how often"
            " target and drafter have the same most likely token; tokens per round: for a chain of all depths; +-:"
            " standard error over seeds."
        ],
        folder=subject.folder,
        kind=kind,
        texts=texts,
        steps=steps,
        depth=depth,
        seeds=seeds,
    )


def windows(tokenizer: Any, documents: list[Any]) -> list[Row]:
    """Return all documents as sequences of `LENGTH` tokens."""
    ids = (tokenizer(one.text, verbose=False)["input_ids"] for one in documents)
    return [part for row in ids for part in parts(of_answer((), row), LENGTH) if len(part.tokens) == LENGTH]


def _source(target: jspec.Llama, rows: list[Row], trainee: Trainee, folder: Path) -> Source:
    plan = Plan(rows, STEP_TOKENS, 0)
    stored = StoredStates(folder, plan, trainee.features, "bench", trainee.draft_ids is not None)
    stored.write(target, lambda done, whole: typer.echo(f"read {done} of {whole} texts", err=True))
    return Source(plan, stored)


def _trained(target: Any, trainee: Trainee, sources: list[Source], schedule: Schedule, folder: Path) -> list[float]:
    """Return the first draft token's acceptance at temperature 1 and with greedy decoding, and the tokens per round."""
    fit(trainee, target, *sources, schedule, folder)
    *_, last = read_log(folder)
    rates = last.acceptance, last.agreement
    typer.echo(f"{schedule.loss}: accepted {rates[0][0]:.3f}, greedy {rates[1][0]:.3f}", err=True)
    return [rates[0][0], rates[1][0], *(predicted(one) for one in rates)]


def _summary(found: list[list[float]]) -> dict[str, float]:
    values = np.array(found)
    names = "accepted", "greedy", "tokens per round", "greedily"
    errors = values.std(axis=0, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.zeros(values.shape[1])
    pairs = zip(names, values.mean(axis=0), errors, strict=True)
    return {head: float(value) for name, mean, error in pairs for head, value in ((name, mean), (f"+- {name}", error))}
