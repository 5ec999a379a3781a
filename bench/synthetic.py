"""Acceptance at a chosen rate, for models with random weights. Every pass and draw is real; the text means nothing."""

import jax.numpy as jnp
from jax import Array

from jspec.accept import RULES, Rule, next_probs
from jspec.keys import Purpose, stream, uniform
from jspec.probs import sample
from jspec.types import Draft, Verdict


def synthetic(acceptance: float) -> str:
    """The name of a rule, now known to jspec, that accepts each draft with this probability."""

    def judge(keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        num_draft_tokens = draft.tokens.shape[1]
        uniforms = uniform(stream(keys, start[:, None] + jnp.arange(num_draft_tokens), Purpose.ACCEPT))
        accepted = jnp.cumprod((uniforms < acceptance).astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        next_keys = stream(keys, start + accepted, Purpose.TARGET)
        return Verdict(accepted, sample(next_keys, next_probs(accepted, draft, target_probs)))

    name = f"synthetic {acceptance:g}"
    RULES.setdefault(name, Rule(name, exact=False, judge=judge))
    return name
