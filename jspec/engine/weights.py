# pyright: strict, reportUnknownMemberType=false
"""The check that an engine's models still hold the weights that its programs read."""

from collections.abc import Sequence
from typing import Any

import jax


def check_unchanged(target: Any, drafter: Any, weights: Sequence[Any]) -> None:
    """Raise RuntimeError unless `weights` are the very arrays that the models hold, and exist.

    An engine reads the arrays it was made with, and its slots hold what those made of earlier texts. A text decoded
    after an update would silently be one of the old weights.

    Args:
        target: the model.
        drafter: the drafter, or None.
        weights: the leaves of ``(target, drafter)`` when the engine was made.
    """
    start = 0
    for name, model in (("target", target), ("draft", drafter)):
        leaves = jax.tree.leaves(model)
        own = weights[start : start + len(leaves)]
        start += len(leaves)
        if len(own) != len(leaves) or any(leaf is not weight for leaf, weight in zip(leaves, own, strict=True)):
            raise RuntimeError(f"The weights of the {name} have changed since this engine was made, which still has "
                               "the old ones; make a new Engine of the model as it is now.")  # fmt: skip
    check_exist(weights)


def check_exist(weights: Sequence[Any]) -> None:
    """Raise RuntimeError if any of the weights was deleted, as a jitted step does with arrays donated to it."""
    if any(isinstance(weight, jax.Array) and weight.is_deleted() for weight in weights):
        raise RuntimeError("Weights of this engine were deleted, as a call does with arrays donated to it; make a new "
                           "Engine of weights that exist.")  # fmt: skip
