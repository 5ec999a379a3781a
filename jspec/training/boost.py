"""Draft models that complete each other: each learns where those before it are wrong."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.drafters import ModelDrafter
from jspec.training.batches import Plan
from jspec.training.dataset import Row
from jspec.training.heads import model
from jspec.training.target_states import look


def left_over(target: Any, drafter: ModelDrafter, rows: Sequence[Row], step_tokens: int) -> list[Row]:
    """`rows` with only those tokens to be guessed of which `drafter` and the target do not find the same one likeliest.

    Miao et al. 2024, "SpecInfer", section 3, boost-tuning. Rows without any such token are left out.

    Raises:
        ValueError: nothing is left.
    """
    found: list[Row] = []
    for batch in Plan(rows, step_tokens, seed=0).in_order():
        learned = batch.learned & ~np.asarray(_alike(target, drafter, batch.tokens))
        for number, wrong in zip(batch.numbers, learned, strict=True):
            row = rows[number]
            wrong = wrong[: len(row.tokens)]
            if number >= 0 and wrong[2:].any():
                found.append(dataclasses.replace(row, learned=wrong))
    if not found:
        raise ValueError("The draft models so far guess all that the target says; train fewer (boost).")
    return found


@jax.jit
def _alike(target: Any, drafter: ModelDrafter, tokens: Array) -> Array:
    """``bool[B, S]``: whether both find the same token likeliest in this place; never in the first one."""
    sight = look(target, tokens, ())
    (said,) = model(drafter, target, tokens, sight, 1)
    same = said.argmax(-1) == target.logits(sight.hidden).argmax(-1)
    return jnp.pad(same[:, :-1], ((0, 0), (1, 0)))
