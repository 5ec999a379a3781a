# pyright: strict, reportUnknownMemberType=false
"""Speculative sampling: token by token, and of siblings one after another."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.base import Rule
from jspec.acceptance.walk import (
    Bound,
    along,
    end_of,
    follow,
    kept_in_turn,
    law_behind,
    length_of_prefix,
    sibling_uniforms,
    whole,
)
from jspec.core.keys import Purpose, positions_from, stream, uniform
from jspec.core.probs import at_tokens, residual, sample
from jspec.core.types import Draft, Verdict


@dataclasses.dataclass(frozen=True)
class Rejection(Rule):
    """Speculative sampling, token by token (Leviathan et al. 2023, section 2.3; Chen et al. 2023, algorithm 2).

    Of several children the eldest is judged first, the next by what the refusal has left of the target's law, and so
    on (Miao et al. 2024, SpecInfer, algorithm 2). That is exact whenever each was drawn from its law, given its elder
    siblings: by induction from the last, each step is speculative sampling from what is left.
    """

    exact: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        if draft.topology.is_chain:
            return accept_tokens(keys, start, draft, target_probs, target_probs[:, :-1])
        return accept_nodes(keys, start, draft, target_probs)


def accept_tokens(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Array) -> Verdict:
    """Accept token after token, x with probability ``min(1, bound(x) / q(x))``, until the first failure.

    The token after is drawn from what the accepted mass ``min(q, bound)`` has left of p. With p as the bound it is
    speculative sampling; a larger bound, somewhere, is a lossy rule.

    Args:
        keys, start, draft, target_probs: as for `Rule.accept`.
        bound: ``float32[B, K, V]``.
    """
    uniforms = uniform(stream(keys, positions_from(start, draft.tokens.shape[1]), Purpose.ACCEPT))
    num_accepted = count_accepted(uniforms, draft, bound)
    accepted = Draft(draft.tokens, jnp.minimum(draft.probs, bound))
    law = next_probs(num_accepted, accepted, target_probs)
    return Verdict(num_accepted, sample(stream(keys, start + num_accepted, Purpose.TARGET), law))


def accept_nodes(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Bound = whole) -> Verdict:
    """`accept_tokens` of a tree: children in turn, then the token behind the path; with `kept_in_turn`'s receipt."""
    tree = draft.static_tree
    kept, distortion = kept_in_turn(sibling_uniforms(keys, start, tree), draft, target_probs, bound)
    num_accepted, path = follow(kept, tree)
    law = law_behind(end_of(num_accepted, path), draft, target_probs, bound)
    token = sample(stream(keys, start + num_accepted, Purpose.TARGET), law)
    return Verdict(num_accepted, token, None if bound is whole else along(distortion, path), path)


def count_accepted(uniforms: Array, draft: Draft, bound: Array) -> Array:
    """How many drafted tokens are accepted: x with probability ``min(1, bound(x) / q(x))``, until the first failure.

    Leviathan et al. 2023, algorithm 1. Written ``u q < p``: strict, so that a token with p = 0 is never accepted even
    at u = 0, and without a division. A token with q = 0 or NaN was not drawn from q; it is refused.

    Args:
        uniforms: ``[B, K]`` in [0, 1).
        draft: tokens ``[B, K]`` and their laws ``[B, K, V]``.
        bound: ``[B, K, V]``, p for an exact rule.

    Returns:
        ``int32[B]`` in 0..K.
    """
    q = at_tokens(draft.probs, draft.tokens)
    return length_of_prefix((q > 0) & (uniforms * q < at_tokens(bound, draft.tokens)))


def next_probs(num_accepted: Array, draft: Draft, target_probs: Array, weight: Array | None = None) -> Array:
    """The law of the token after the accepted prefix, ``[B, V]``.

    After a rejection, what is left of p, times ``weight[B, 1]`` if given, when q is taken off it; after K acceptances p
    itself, which is what is left when nothing is taken off.
    """
    draft_probs = jnp.pad(draft.probs, ((0, 0), (0, 1), (0, 0)))
    at = num_accepted[:, None, None]
    p = jnp.take_along_axis(target_probs, at, axis=1)[:, 0]
    q = jnp.take_along_axis(draft_probs, at, axis=1)[:, 0]
    return residual(p if weight is None else weight * p, q)
