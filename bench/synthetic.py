"""Acceptance at a chosen rate, for models with random weights. Every pass and draw is real; the text means nothing."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jspec.keys import Purpose, stream, uniform
from jspec.probs import sample
from jspec.rules import length_of_prefix, next_probs
from jspec.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Accepts each draft with probability `acceptance`, whatever it is."""

    acceptance: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"synthetic {self.acceptance:g}"

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        num_draft_tokens = draft.tokens.shape[1]
        uniforms = uniform(stream(keys, start[:, None] + jnp.arange(num_draft_tokens), Purpose.ACCEPT))
        accepted = length_of_prefix(uniforms < self.acceptance)
        next_keys = stream(keys, start + accepted, Purpose.TARGET)
        return Verdict(accepted, sample(next_keys, next_probs(accepted, draft, target_probs)))
