"""The optimiser that trains drafters."""

from typing import Any

import optax

from jspec.training.kinds import Trainee

_WARMUP, _CLIP = 0.03, 1.0


def optimizer(trainee: Trainee, rate: float, steps: int | None) -> optax.GradientTransformation:
    """Return an optimiser: Muon for matrices other than tables, and AdamW at half the rate for the rest.

    The rate warms up to `rate`, then falls linearly to zero. In an endless run (None for `steps`), it is constant.
    """
    schedule = optax.constant_schedule(rate)
    if steps is not None:
        warm = max(1, int(_WARMUP * steps))
        down = optax.linear_schedule(rate, 0, steps - warm)
        schedule = optax.join_schedules([optax.linear_schedule(rate / warm, rate, warm), down], [warm])
    matrices: Any = {
        name: optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 and name not in trainee.tables else None
        for name, leaf in trainee.weights.items()
    }
    muon = optax.contrib.muon(
        schedule,
        consistent_rms=0.2,
        adam_learning_rate=lambda step: schedule(step) / 2,
        muon_weight_dimension_numbers=matrices,
    )
    return optax.chain(optax.clip_by_global_norm(_CLIP), muon)
