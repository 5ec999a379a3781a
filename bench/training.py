"""Training: tokens per second, a breakdown of a step's time, and its memory use."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import typer

from bench import plots
from bench.report import publish
from bench.subject import Subject
from bench.timing import in_turns
from jspec.training.batches import Batch, side_by_side
from jspec.training.dataset import of_answer
from jspec.training.fit import Schedule, begin
from jspec.training.kinds import KINDS, Trainee, trainee_of
from jspec.training.target_states import TargetStates, distribution_stats, run_target

LENGTH = 256


def run(subject: Subject, kinds: list[str], step_tokens: int, depth: int, draft_vocab: int, repeats: int) -> None:
    """Measure a step of every kind on the same batch of random tokens, because the cost does not depend on them."""
    target, rng = subject.target, np.random.default_rng(0)
    rows = rng.integers(target.config.vocab_size, size=(max(1, step_tokens // LENGTH), LENGTH))
    batch = side_by_side([of_answer((), row.tolist()) for row in rows], len(rows), LENGTH)
    found = []
    for kind in kinds:
        typer.echo(f"{kind} ...", err=True)
        found.append({"kind": kind} | _measured(target, kind, batch, depth, draft_vocab, repeats))
    publish(
        f"training-{subject.name}",
        f"Training for {subject.name}: a step of {batch.tokens.size} tokens, depth {depth}",
        found,
        plots.training,
        notes=[
            "tokens/s: the whole step with stored input; unstored: with the target's pass in every step; target: the"
            " target's pass over the batch; forward: the drafter's output and the loss; back: gradients and the"
            " optimiser. temporary: the step's memory without its arguments; kept: weights and moments."
        ],
        folder=subject.folder,
        depth=depth,
        draft_vocab=draft_vocab,
        length=LENGTH,
        repeats=repeats,
    )


def _measured(target: Any, kind: str, batch: Batch, depth: int, draft_vocab: int, repeats: int) -> dict[str, Any]:
    few = np.arange(min(draft_vocab, target.config.vocab_size)) if kind in ("block", "eagle") else None
    trainee = trainee_of(KINDS[kind](target, few, depth, 0))
    training = begin(trainee, Schedule(None, depth))
    read = jax.jit(functools.partial(_read, trainee))
    target_states = jax.block_until_ready(read(target, batch.tokens))
    state = jax.tree.map(jax.numpy.copy, training.state)
    stored = training.step.lower(state, target, batch.tokens, batch.learned, target_states).compile()

    def step(made: Callable[..., Any], seen: TargetStates | None) -> Any:
        nonlocal state
        state, score = made(state, target, batch.tokens, batch.learned, seen)
        return score

    seconds = in_turns(
        {
            "target": lambda: read(target, batch.tokens),
            "forward": lambda: training.score(training.state, target, batch.tokens, batch.learned, target_states),
            "step": lambda: step(stored, target_states),
            "unstored": lambda: step(training.step, None),
        },
        repeats,
    )
    median = {name: float(np.median(values)) for name, values in seconds.items()}
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves({name: state[name] for name in ("weights", "moments")}))
    return {
        "trained, M": sum(leaf.size for leaf in trainee.weights.values()) / 1e6,
        "tokens/s": batch.tokens.size / median["step"],
        "unstored": batch.tokens.size / median["unstored"],
        "target, ms": 1e3 * median["target"],
        "forward, ms": 1e3 * median["forward"],
        "back, ms": 1e3 * max(0.0, median["step"] - median["forward"]),
        "temporary, MB": stored.memory_analysis().temp_size_in_bytes / 1e6,
        "kept, MB": kept / 1e6,
    }


def _read(trainee: Trainee, target: Any, tokens: Any) -> TargetStates:
    """Return the data that is stored for a batch."""
    target_states = run_target(target, tokens, trainee.features)
    return (
        target_states
        if trainee.draft_ids is None
        else target_states._replace(stats=distribution_stats(target, target_states.hidden))
    )
