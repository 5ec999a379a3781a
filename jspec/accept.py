"""Acceptance rules: plain functions from a draft and the target's laws to a verdict, each declaring if it is exact."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from jspec.keys import Purpose, stream, uniform
from jspec.probs import at_tokens, residual, sample
from jspec.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    Attributes:
        name: what users pass as ``accept=``.
        exact: whether the text it leads to has the target's law whatever the draft.
        judge: ``(keys [B], start int32[B], draft, target_probs float32[B, K + 1, V]) -> Verdict``, where ``start`` is
            the position of the first drafted token and ``target_probs[:, k]`` the target's law at ``start + k``.
    """

    name: str
    exact: bool
    judge: Callable[[Array, Array, Draft, Array], Verdict]


def count_accepted(uniforms: Array, draft: Draft, target_probs: Array) -> Array:
    """How many drafted tokens are accepted: token x with probability ``min(1, p(x)/q(x))``, until the first failure.

    Leviathan et al. 2023, algorithm 1. Written ``u q < p``: strict, so that a token with p = 0 is never accepted even
    at u = 0, and without a division. A token with q = 0 or NaN was not drawn from q; it is refused.

    Args:
        uniforms: ``[B, K]`` in [0, 1).
        draft: tokens ``[B, K]`` and their laws ``[B, K, V]``.
        target_probs: ``[B, K + 1, V]``.

    Returns:
        ``int32[B]`` in 0..K.
    """
    p = at_tokens(target_probs[:, : draft.tokens.shape[1]], draft.tokens)
    q = at_tokens(draft.probs, draft.tokens)
    accepted = (q > 0) & (uniforms * q < p)
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def next_probs(num_accepted: Array, draft: Draft, target_probs: Array) -> Array:
    """The law of the token after the accepted prefix, ``[B, V]``.

    After a rejection, what is left of p when q is taken off it; after K acceptances p itself, which is what is left
    when nothing is taken off.
    """
    draft_probs = jnp.pad(draft.probs, ((0, 0), (0, 1), (0, 0)))
    at = num_accepted[:, None, None]
    p = jnp.take_along_axis(target_probs, at, axis=1)[:, 0]
    q = jnp.take_along_axis(draft_probs, at, axis=1)[:, 0]
    return residual(p, q)


def rejection(keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
    """Speculative sampling (Leviathan et al. 2023, section 2.3; Chen et al. 2023, algorithm 2). Exact."""
    num_draft_tokens = draft.tokens.shape[1]
    positions = start[:, None] + jnp.arange(num_draft_tokens)
    num_accepted = count_accepted(uniform(stream(keys, positions, Purpose.ACCEPT)), draft, target_probs)
    next_keys = stream(keys, start + num_accepted, Purpose.TARGET)
    return Verdict(num_accepted, sample(next_keys, next_probs(num_accepted, draft, target_probs)))


RULES = {rule.name: rule for rule in (Rule("rejection", exact=True, judge=rejection),)}
