"""Timing: the calls to be compared take turns, so that they run under the same machine conditions."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median with its quartiles and the number of readings."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Any) -> Spread:
    """Return the median and quartiles of `values`."""
    low, median, high = (float(q) for q in np.percentile(values, [25, 50, 75]))
    return Spread(median, low, high, len(values))


def seconds(call: Callable[[], Any]) -> float:
    """Return the wall time of one call, including its device work."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2) -> dict[str, np.ndarray]:
    """Return the seconds of every call, ``float64[repeats]`` each, measured in the order A B C, A B C, ...

    The first `warmup` calls of a program are not recorded, because GPUs build their command buffers in them.
    """
    readings: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            taken = seconds(call)
            if turn >= warmup:
                readings[name].append(taken)
    return {name: np.array(values) for name, values in readings.items()}


def ratio(of: np.ndarray, to: np.ndarray) -> Spread:
    """Return the spread of the ratios `of` / `to` between readings from the same turn."""
    return spread(of / to)


def mean_ratio(of: np.ndarray, to: np.ndarray) -> Spread:
    """Return the geometric mean of the ratios `of` / `to` with its 95 % interval, from readings of different questions.

    The interval is a bootstrap interval over the readings. For a single reading, its width is 0.
    """
    logs = np.log(of / to)
    draws = np.random.default_rng(0).integers(0, logs.size, (2000, logs.size))
    low, high = (float(q) for q in np.exp(np.percentile(logs[draws].mean(1), [2.5, 97.5])))
    return Spread(float(np.exp(logs.mean())), low, high, logs.size)
