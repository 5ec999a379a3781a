"""Draft models that complement each other: each model learns the tokens that earlier models get wrong."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.drafters import ModelDrafter
from jspec.models.llama import Llama
from jspec.training.batches import Plan
from jspec.training.dataset import Row
from jspec.training.heads import model
from jspec.training.target_states import TargetStates, run_target


def left_over(target: Llama, drafter: ModelDrafter, rows: Sequence[Row], step_tokens: int) -> list[Row]:
    """Keep only the learned tokens for which `drafter` and `target` have different most likely tokens.

    This is boost-tuning (Miao et al. 2024, "SpecInfer", section 3). Rows without any such token are dropped.

    Raises:
        ValueError: no row remains.
    """
    found: list[Row] = []
    for batch in Plan(rows, step_tokens, seed=0).in_order():
        learned = batch.learned & ~np.asarray(cast(Array, _alike(target, drafter, batch.tokens)))
        for number, wrong in zip(batch.numbers, learned, strict=True):
            row = rows[cast(int, number)]
            wrong = wrong[: len(row.tokens)]
            if number >= 0 and wrong[2:].any():
                found.append(dataclasses.replace(row, learned=wrong))
    if not found:
        raise ValueError("The draft models so far already predict every token of the target; train fewer models.")
    return found


@jax.jit
def _alike(target: Llama, drafter: ModelDrafter, tokens: Array) -> Array:
    """Return ``bool[B, S]``, whether both models have the same top token at each position. Position 0 is False."""
    target_states = cast(TargetStates, run_target(target, tokens, ()))
    (said,) = model(drafter, target, tokens, target_states, 1)
    same = said.argmax(-1) == target.logits(target_states.hidden).argmax(-1)
    return jnp.pad(same[:, :-1], ((0, 0), (1, 0)))
