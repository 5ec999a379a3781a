"""The choice of a draft length from the measured cost and yield of rounds.

Nothing in this file decodes. `jspec.tuning.tune` provides a function that decodes. This file times it, counts its
tokens, and chooses the best length.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from typing import Any, cast

import jax
import numpy as np
from jax import Array

from jspec import theory
from jspec.core.sampling import SamplingParams, by_name
from jspec.core.tree import Tree
from jspec.core.types import ACCEPTED, PADDING, Output, PyTree
from jspec.drafters.draft_length import doubling

log = logging.getLogger(__name__)  # reports progress, which the command shows
TRIALS = 5
_LONG = 128  # the number of new tokens in the longer of two runs
_TRUST = 0.03  # the relative error of the predicted tokens per round, on the bundled pair in `bench trees`
_PATIENCE = 20.0  # the number of seconds after which no further trial starts

Setting = int | Tree  # the number of draft tokens (0 for plain decoding), or a tree to draft instead of a chain
# Arguments: a setting, the limit on new tokens, and the trial number, which determines the keys.
Run = Callable[[Setting, int, int], Output]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of `jspec.tune`, for the device, batch size and prompts that it measured.

    Attributes:
        num_draft_tokens: the fastest K. 0 means that drafting does not pay off: use `jspec.generate`.
        speedup: the predicted speed with that K, relative to plain decoding; 1 for K = 0.
        plain_seconds: the duration of one plain decoding step in seconds. A step yields one token per row.
        round_seconds: the duration of one round in seconds, for K = 1, 2, .... The duration is measured for powers of
            two, the largest K and the fastest K, and interpolated between them.
        expected_tokens: the number of tokens per row in one round, for K = 1, 2, .... For every measured K, this number
            is the weighted mean of the count and of the prediction from the largest K.
        tree: the tree that a `jspec.TreeDrafter` should draft (under "k-seq" with replacement), if it is faster than
            any chain. None if no tree is faster, or if no tree was tried.
        tree_speedup: the speed with `tree`, relative to plain decoding, computed from measured seconds and the weighted
            mean of predicted and counted tokens. 0 if `tree` is None.
    """

    num_draft_tokens: int
    speedup: float
    plain_seconds: float
    round_seconds: tuple[float, ...]
    expected_tokens: tuple[float, ...]
    tree: Tree | None = None
    tree_speedup: float = 0.0

    @property
    def speedups(self) -> tuple[float, ...]:
        """The predicted speed relative to plain decoding, for K = 1, 2, ..."""
        return _speedups(self.plain_seconds, self.round_seconds, self.expected_tokens)


def best_length(
    plain_seconds: float, round_seconds: Sequence[float], expected_tokens: Sequence[float]
) -> tuple[int, float]:
    """Return the K that maximises the speedup ``E(K) plain_seconds / round_seconds(K)``, and that speedup.

    K = 0 is plain decoding, with speedup 1. Ties go to the smaller K. Theorem 3.8 of Leviathan et al. 2023 covers the
    special case of independent positions and a verification that costs one step of the target.
    """
    speedups = 1.0, *_speedups(plain_seconds, round_seconds, expected_tokens)
    best = int(np.argmax(speedups))
    return best, speedups[best]


def _speedups(plain: float, seconds: Sequence[float], tokens: Sequence[float]) -> tuple[float, ...]:
    return tuple(n * plain / s for n, s in zip(tokens, seconds, strict=True))


def measure(run: Run, max_new_tokens: int, max_draft_tokens: int) -> Tuning:
    """Time plain decoding and chains of these lengths: powers of two, the maximum, and the predicted best length."""
    costs, outs = in_turns(run, (0, *doubling(max_draft_tokens)), max_new_tokens)
    found = _between(costs, outs, max_draft_tokens)
    while (best := found.num_draft_tokens) not in costs:  # an interpolated length must be measured before it is chosen
        again, texts = in_turns(run, (0, best), max_new_tokens)
        costs[best], outs[best] = again[best] * costs[0] / again[0], texts[best]
        found = _between(costs, outs, max_draft_tokens)
    return found


def _between(costs: dict[Setting, float], outs: dict[Setting, list[Output]], max_draft_tokens: int) -> Tuning:
    """Return the tuning for all lengths, from the measured chains."""
    every, played = range(1, max_draft_tokens + 1), sorted(k for k in costs if isinstance(k, int) and k)
    rates = acceptance_rates(outs[max_draft_tokens])  # the longest chain has an acceptance rate at every depth
    foreseen = np.array([theory.expected_tokens_from_rates(rates[:k]) for k in every])
    off = [weighed(float(foreseen[k - 1]), outs[k]) / foreseen[k - 1] for k in played]
    tokens = tuple((foreseen * np.interp(every, played, off)).tolist())
    rounds = tuple(np.interp(every, played, [costs[k] for k in played]).tolist())
    return Tuning(*best_length(costs[0], rounds, tokens), costs[0], rounds, tokens)


def weighed(foreseen: float, outs: list[Output]) -> float:
    """Return a row's tokens per round: the mean of prediction and count, weighted by their reliability."""
    rates = acceptance_rates(outs)
    if not rates.size:
        return 1.0
    reached, depths = np.cumprod(rates), np.arange(1, rates.size + 1)
    counted = 1.0 + reached.sum()
    texts = {np.asarray(out.tokens).tobytes(): out for out in outs}  # all greedy trials have the same output
    rounds = max(1, sum(int(out.stats.rounds.sum()) for out in texts.values()))
    noise = max(float(((2 * depths - 1) * reached).sum() - reached.sum() ** 2), 0.0) / rounds
    doubt = (_TRUST * foreseen) ** 2 + noise  # the prediction is also based on a count, over a similar number of rounds
    return float(foreseen + (counted - foreseen) * doubt / (noise + doubt))


def in_turns(
    run: Run, settings: Sequence[Setting], max_new_tokens: int
) -> tuple[dict[Setting, float], dict[Setting, list[Output]]]:
    """Return each setting's seconds per round, and its outputs.

    The settings take turns, so that all run under the same conditions. The seconds are medians of several trials.
    """
    limit = min(max_new_tokens, _LONG)
    for number, setting in enumerate(settings, 1):
        log.info("Compiling program %d of %d", number, len(settings))
        jax.block_until_ready(run(setting, 1, 0))  # compiles
    costs: dict[Setting, list[float]] = {setting: [] for setting in settings}
    outs: dict[Setting, list[Output]] = {setting: [] for setting in settings}
    began = perf_counter()
    for trial in range(TRIALS):
        for number, setting in enumerate(settings):
            log.info(_progress(trial * len(settings) + number, len(settings), perf_counter() - began))
            seconds, out = _round_seconds(run, setting, limit, trial)
            costs[setting].append(seconds)
            outs[setting].append(jax.device_get(out))
        if perf_counter() - began > _PATIENCE:
            break
    return {setting: float(np.median(seconds)) for setting, seconds in costs.items()}, outs


def _progress(done: int, in_trial: int, elapsed: float) -> str:
    """Return the progress message after `done` readings in `elapsed` seconds. A trial has `in_trial` readings."""
    said, total = f"Measuring: {done + 1} of {TRIALS * in_trial}", TRIALS * in_trial
    if done < in_trial:
        return said  # the first reading alone is a poor estimate, because lengths differ
    pace = elapsed / done
    left = min(pace * (total - done), max(_PATIENCE - elapsed, 0) + pace * in_trial)
    return f"{said}, at most {left:.0f} s left"


def _round_seconds(run: Run, setting: Setting, limit: int, trial: int) -> tuple[float, Output]:
    """Return the seconds per round, and the output of the longer run.

    The program runs once with a short limit and once with a long one. The time per round is computed from the
    difference between the two runs, so the costs of prefill and dispatch cancel out.
    """
    (few_seconds, few_rounds, _), (seconds, rounds, out) = (
        _timed(run, setting, tokens, trial) for tokens in (max(limit // 8, 1), limit)
    )
    if seconds > few_seconds and rounds > few_rounds:
        return (seconds - few_seconds) / (rounds - few_rounds), out
    return seconds / rounds, out  # the noise exceeds the difference, so return an upper bound


def _timed(run: Run, setting: Setting, limit: int, trial: int) -> tuple[float, int, Output]:
    """Return the seconds, the number of rounds and the output. The loop runs until the slowest row is done."""
    began = perf_counter()
    out = cast(Output, jax.block_until_ready(run(setting, limit, trial)))
    return perf_counter() - began, int(out.stats.rounds.max()), out


def acceptance_rates(outs: Sequence[Output]) -> np.ndarray:
    """Return the rate at which draft token k is accepted if all earlier tokens are accepted, ``float64[K]``.

    The outputs must have ended only at a limit. Positions need not be identically distributed or independent. A
    position without a draft token counts as not accepted. The limit may cut off a row's last round after an accepted
    draft token. In that case, the token after it is not counted.
    """
    accepted: np.ndarray = np.concatenate([out.stats.accepted_at for out in outs]).sum(0)
    reached = np.array([sum(out.stats.rounds.sum() for out in outs), *accepted[:-1]])
    for out in outs:
        closed = (out.origins != ACCEPTED) & (out.origins != PADDING)  # a round's last token, unless it is cut off
        behind = out.lengths - (closed * np.arange(1, closed.shape[1] + 1)).max(1)
        reached[1:] -= np.bincount(behind, minlength=accepted.size + 1)[1:-1]
    return np.divide(accepted, reached, out=np.zeros(accepted.size), where=reached > 0)


_answers: dict[Hashable, Tuning] = {}
_measuring = threading.Lock()


def remembered(models: PyTree, key: Hashable, find: Callable[[], Tuning]) -> Tuning:
    """Call ``find()`` once per process for `key` and models with these shapes, dtypes and devices; return its result.

    Changing the weights, as in reinforcement learning, does not cause a new measurement. Threads that need the same
    measurement wait until one of them has made it.
    """
    leaves, structure = cast(tuple[list[Any], Hashable], jax.tree.flatten(models))
    key = structure, tuple(map(_description, leaves)), key
    with _measuring:
        if key not in _answers:
            _answers[key] = find()
        return _answers[key]


def _description(leaf: PyTree) -> Hashable:
    """Return the properties of a leaf that affect a program's running time. A plain number is returned as it is."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    return (leaf.shape, leaf.dtype) if hasattr(leaf, "shape") else leaf


def tuning_key(tokens: Array | np.ndarray, max_new_tokens: int, sampling: SamplingParams) -> tuple[Hashable, ...]:
    """Return the properties of a request that affect cost and acceptance, apart from the models.

    These properties are the batch size, the length rounded to a power of two, and the sampling parameters. A parameter
    that is one number for all requests is identified by its value, and an array by whether all its elements are 0.
    Limits are ignored.
    """
    batch, width = tokens.shape
    fields = by_name(sampling)
    del fields["max_tokens"]
    return batch, (width + max_new_tokens - 1).bit_length(), tuple(map(_kind, fields.values()))


def _kind(value: float | Array | np.ndarray | None) -> Hashable:
    if value is None:
        return None
    return ("array", bool(np.any(value))) if np.ndim(value) else float(value)
