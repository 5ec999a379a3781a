# pyright: reportUnknownArgumentType=false
"""The training loop: a jitted step, periodic checkpoints, and evaluation on held-out text."""

import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from convert import unfinished
from convert.errors import CheckpointError, brief, raised_alone
from jspec.core.types import PyTree
from jspec.models.llama import Llama
from jspec.training.batches import Batch, Plan
from jspec.training.dataset import write_text
from jspec.training.kinds import Trainee, Weights
from jspec.training.objective import Score, judge, total
from jspec.training.optimizer import optimizer
from jspec.training.target_states import StoredStates, TargetStates, run_target

_log = logging.getLogger("jspec")
# The share of steps, counted from the first step, that unroll a head to only half the depth. Such a step takes 2/3 of
# the time of a full step (bench/NOTES.md).
_SHALLOW = 0.6
_STATE, _LOG = "state", "log.jsonl"
State: TypeAlias = dict[str, PyTree]  # the weights, the fixed weights and the optimiser's moments
_Inputs: TypeAlias = tuple[Llama, Array, Array, TargetStates | None]
_Spread: TypeAlias = Callable[
    [tuple[np.ndarray, np.ndarray, TargetStates | None]], tuple[Array, Array, TargetStates | None]
]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The length and the learning rate of a training run.

    Attributes:
        steps: the number of optimiser steps; None for an endless run with a constant rate.
        depth: the number of draft tokens to unroll in a row; half as many in the first steps.
        loss: a key of `jspec.training.losses.LOSSES`.
        rate: the peak learning rate for matrices (Muon). Other weights (AdamW) use half of this rate.
        save_every: the number of steps between checkpoints, and between evaluations on held-out text.
    """

    steps: int | None
    depth: int = 4
    loss: str = "lk"
    rate: float = 6e-3
    save_every: int = 50


@dataclasses.dataclass(frozen=True)
class Source:
    """Batches and the target's states for them, which are either stored or computed in each step."""

    plan: Plan
    stored: StoredStates | None = None

    def target_states(self, batch: Batch) -> TargetStates | None:
        return None if self.stored is None else self.stored.read(batch)


@dataclasses.dataclass(frozen=True)
class Progress:
    """One evaluation on held-out text.

    Attributes:
        step: the number of steps taken.
        loss: the mean training loss since the last evaluation.
        acceptance: ``sum min(p, q)`` at temperature 1, by depth.
        agreement: how often the draft and the target have the same most likely token, by depth.
    """

    step: int
    loss: float
    acceptance: list[float]
    agreement: list[float]


def fit(
    trainee: Trainee,
    target: Llama,
    source: Source,
    held_out: Source,
    schedule: Schedule,
    folder: Path,
    say: Callable[[Progress | int], None] = lambda _: None,
) -> Weights:
    """Train from the latest checkpoint in `folder`. Call ``say`` after every step and every evaluation.

    A run can be interrupted at any time. A run that is restarted on the same number of devices takes the same steps as
    an uninterrupted run.
    """
    training = begin(trainee, schedule)
    early = training.step
    if trainee.repeats:
        early = begin(trainee, dataclasses.replace(schedule, depth=max(1, schedule.depth // 2))).step
    first, state = _restored(folder, training.state)
    state, spread = _placed(state)
    target = _everywhere(target)
    folder.mkdir(parents=True, exist_ok=True)
    _cut_log(folder / _LOG, first)
    recent: list[Array] = []
    if first:
        _log.info("Resuming after step %d", first)
    assert schedule.steps is not None, "training without an end has no plan"
    for number in range(first, schedule.steps):
        batch = source.plan.batch(number)
        inputs = spread((batch.tokens, batch.learned, source.target_states(batch)))
        step = early if number < _SHALLOW * schedule.steps else training.step
        state, loss = step(state, target, *inputs)
        recent.append(loss)
        jax.block_until_ready(recent[:-1][-1:])  # wait for the previous step; this one runs while the next batch loads
        say(number + 1)
        if (number + 1) % schedule.save_every == 0 or number + 1 == schedule.steps:
            found = measure(training, state, target, held_out)
            loss = float(np.mean(jax.device_get(recent)))
            # There may also be no tokens to score if each model learns only the tokens that earlier models got wrong.
            expected = any(row.learned[2:].any() for row in held_out.plan.rows)
            if not np.isfinite([loss, *found.loss]).all() or (expected and not found.tokens[0]):
                raise ValueError(
                    f"After {number + 1} steps the loss is {loss} and the held-out loss is {found.loss[0]}, over "
                    f"{found.tokens[0]:.0f} scored tokens: the rate is too high, or the target's hidden states "
                    "are not finite; use a smaller rate in another folder, or restore the target."
                )
            progress = Progress(number + 1, loss, found.acceptance.tolist(), found.agreement.tolist())
            recent.clear()
            _save(folder, number + 1, state, progress)
            say(progress)
    return state["weights"]


class Training(NamedTuple):
    """A training run before its first step.

    Attributes:
        state: the weights, the fixed weights and the optimiser's moments.
        step: a function that maps a state, which it consumes, and a batch to ``(state, loss)``. The loss is that of
            the weights before the step.
        scored_step: a slower version of `step` that returns the whole `Score` in place of the loss.
        score: a function that maps a state and a batch to their `Score`.

    Every function takes a batch as four arguments: the target, `tokens` and `learned` as in `Batch`, and the
    `TargetStates` of the tokens or None.
    """

    state: State
    step: Callable[..., tuple[State, Array]]
    scored_step: Callable[..., tuple[State, Score]]
    score: Callable[..., Score]


def begin(trainee: Trainee, schedule: Schedule) -> Training:
    """Return a `Training` whose functions compile once for each batch shape."""
    optimiser = optimizer(trainee, schedule.rate, schedule.steps)

    def said(weights: Weights, fixed: Weights, *batch: *_Inputs) -> Score:
        return _said(trainee, schedule, fixed | weights, *batch)

    def loss_of(*rest: *tuple[Weights, Weights, *_Inputs]) -> tuple[Array, Score]:
        found = said(*rest)
        return total(found), found

    @functools.partial(jax.jit, donate_argnums=0)
    def scored_step(state: State, *batch: *_Inputs) -> tuple[State, Score]:
        gradient, found = cast(
            tuple[Weights, Score], jax.grad(loss_of, has_aux=True)(state["weights"], state["fixed"], *batch)
        )
        updates, moments = optimiser.update(gradient, state["moments"], state["weights"])
        new = {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}
        # Without this check, Muon would take a full step from its moments alone, and one NaN would become many.
        learns = (found.tokens.sum() > 0) & jnp.isfinite(optax.tree.norm(gradient))
        return state | jax.tree.map(lambda a, b: jnp.where(learns, a, b), new, _changing(state)), found

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, *batch: *_Inputs) -> tuple[State, Array]:
        state, found = cast(tuple[State, Score], scored_step(state, *batch))
        return state, total(found)  # the rest of the score is then not computed

    @jax.jit
    def score(state: State, *batch: *_Inputs) -> Score:
        return said(state["weights"], state["fixed"], *batch)

    weights = trainee.weights
    state = {"weights": weights, "fixed": trainee.fixed, "moments": optimiser.init(weights)}
    return Training(state, step, scored_step, score)


def measure(training: Training, state: State, target: Llama, held_out: Source) -> Score:
    """Return the score on all held-out rows: means over tokens, or 0 for a depth without tokens."""
    parts = [
        jax.device_get(training.score(state, target, batch.tokens, batch.learned, held_out.target_states(batch)))
        for batch in held_out.plan.in_order()
    ]
    counts = np.stack([part.tokens for part in parts])
    means = [(np.stack([part[i] for part in parts]) * counts).sum(0) / np.maximum(counts.sum(0), 1) for i in range(3)]
    return Score(means[0], means[1], means[2], counts.sum(0))


def predicted(acceptance: list[float]) -> float:
    """Return the predicted tokens per round for a chain with these acceptance rates by depth.

    A draft token is kept only if all draft tokens before it are kept.
    """
    return 1 + float(np.cumprod(acceptance).sum())


def _said(
    trainee: Trainee,
    schedule: Schedule,
    weights: Weights,
    target: Llama,
    tokens: Array,
    learned: Array,
    target_states: TargetStates | None,
) -> Score:
    target_states = (
        cast(TargetStates, run_target(target, tokens, trainee.features)) if target_states is None else target_states
    )
    # In float16, small gradients would underflow to 0.
    dtype = jnp.float32 if target.dtype == jnp.float16 else target.dtype
    target_states = jax.lax.stop_gradient(target_states)
    target_states = target_states._replace(
        states=target_states.states.astype(target.dtype), hidden=target_states.hidden.astype(target.dtype)
    )
    target_states, learned = _finite(target_states, learned)
    floating = {name for name, leaf in weights.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    weights = {name: leaf.astype(dtype) if name in floating else leaf for name, leaf in weights.items()}
    judged = judge(target, target_states, trainee.draft_ids, learned)
    return trainee.score(weights, target, tokens, target_states, judged, schedule.depth, schedule.loss)


def _finite(target_states: TargetStates, learned: Array) -> tuple[TargetStates, Array]:
    """Mask sequences in which any target state is not finite, because one such state would corrupt all weights."""
    states, hidden = target_states.states, target_states.hidden
    kept = jnp.isfinite(states).all((1, 2, 3)) & jnp.isfinite(hidden).all((1, 2))
    states, hidden = jnp.where(kept[:, None, None, None], states, 0), jnp.where(kept[:, None, None], hidden, 0)
    return target_states._replace(states=states, hidden=hidden), learned & kept[:, None]


def _placed(state: State) -> tuple[State, _Spread]:
    """Return a copy of the state on every device, and a function that divides a batch's rows among the devices."""
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    by_row = NamedSharding(mesh, PartitionSpec("rows"))
    own = jax.tree.map(jnp.copy, state)  # the step consumes its state's buffers
    return jax.device_put(own, NamedSharding(mesh, PartitionSpec())), functools.partial(jax.device_put, device=by_row)


def _everywhere(target: Llama) -> Llama:
    """Return the target on all devices. A target on only some devices is copied once here, not at every step."""
    devices = cast(Sequence[object], jax.devices())
    whole = NamedSharding(Mesh(np.array(devices), ("rows",)), PartitionSpec())

    def placed(leaf: Array) -> Array:
        return leaf if len(leaf.sharding.device_set) == len(devices) else jax.device_put(leaf, whole)

    return jax.tree.map(placed, target)


def _checkpointer(folder: Path) -> Any:
    from orbax.checkpoint import v1 as ocp  # imported lazily, because the import takes over a second

    kept: Any = ocp.training.preservation_policies.LatestN(2)
    return ocp.training.Checkpointer(str((folder / _STATE).absolute()), preservation_policy=kept)


def _restored(folder: Path, state: State) -> tuple[int, State]:
    """Return the number of steps taken, and the state after them."""
    if not (folder / _STATE).exists():
        return 0, state
    with _checkpointer(folder) as checkpoints:
        if checkpoints.latest is None:
            return 0, state
        return checkpoints.latest.step, state | checkpoints.load(None, _changing(state))


def _save(folder: Path, step: int, state: State, progress: Progress) -> None:
    """Append to the log, then write a checkpoint.

    The log comes first, because a restart removes its lines for steps after the latest checkpoint.

    Raises:
        convert.CheckpointError: the checkpoint could not be written; the previous one remains.
    """
    with (folder / _LOG).open("a", encoding="utf-8") as log:
        log.write(json.dumps(dataclasses.asdict(progress)) + "\n")
    where = folder / _STATE
    try:
        with raised_alone(), _checkpointer(folder) as checkpoints:
            checkpoints.save(step, _changing(state), overwrite=True)
    except Exception as error:  # the storage layer reports a full disk in several ways
        for partial in where.glob("*-tmp*"):
            unfinished.remove(partial)
        free = shutil.disk_usage(folder).free / 1e6
        raise CheckpointError(
            f"The checkpoint after step {step} could not be written to {where}, where {free:.0f} MB are free "
            f"({brief(error)}); check the disk's free space and permissions, then run again to resume from the "
            "previous checkpoint, if any."
        ) from error


def _changing(state: State) -> State:
    return {name: state[name] for name in ("weights", "moments")}


def read_log(folder: Path) -> Iterator[Progress]:
    """Yield all evaluations so far."""
    file = folder / _LOG
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        yield Progress(**json.loads(line))


def _cut_log(file: Path, step: int) -> None:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    whole = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    write_text(file, "".join(f"{line}\n" for line in whole))
