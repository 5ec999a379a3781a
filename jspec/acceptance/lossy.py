# pyright: strict, reportUnknownMemberType=false
"""Lossy acceptance rules: they accept more than the target's law allows, and say how much more.

None is reachable without being named. Each accepts a token x of the draft up to a bound above p(x), and returns a
receipt: at every position the total variation distance, given the text before it, between the law of the token and the
target's, ``sum_x max(min(q(x), bound(x)) - p(x), 0)``. Its sum over a text is ``out.stats.distortion``, whose mean over
requests bounds the total variation distance of whole texts.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance.base import Rule
from jspec.acceptance.rejection import accept_tokens
from jspec.types import Draft, Verdict, check_between, check_count


@dataclasses.dataclass(frozen=True)
class Lenient(Rule):
    """No token is more than ``1 / leniency`` times as likely as under the target (Leviathan et al. 2023, appendix A.5).

    Attributes:
        leniency: l in (0, 1]; 1 is exact, 0.1 lets a token become ten times as likely.
    """

    leniency: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_between("leniency", self.leniency, 0, 1)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        return _accept_up_to(keys, start, draft, target_probs, target_probs[:, :-1] / self.leniency)


@dataclasses.dataclass(frozen=True)
class Typical(Rule):
    """Typical acceptance: keep x where ``p(x) > min(epsilon, delta exp(-H(p)))``, H being entropy (Medusa).

    Attributes:
        epsilon: in (0, 1], the probability that is always enough.
        delta: in (0, 1], how much less is enough where the target is undecided. Medusa's code: 0.09 and 0.3.
    """

    epsilon: float
    delta: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_between("epsilon", self.epsilon, 0, 1)
        check_between("delta", self.delta, 0, 1)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        p = target_probs[:, :-1]
        entropy = -jnp.where(p > 0, p * jnp.log(p), 0).sum(-1, keepdims=True)
        return _accept_set(
            keys, start, draft, target_probs, p > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        )


@dataclasses.dataclass(frozen=True)
class TopK(Rule):
    """Keep what is among the target's k likeliest tokens, or as likely as the last of them."""

    k: int
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("k", self.k)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        p = target_probs[:, :-1]
        least = lax.top_k(p, min(self.k, p.shape[-1]))[0][..., -1:]
        return _accept_set(keys, start, draft, target_probs, (p >= least) & (p > 0))


@dataclasses.dataclass(frozen=True)
class Threshold(Rule):
    """Keep what the target gives at least this probability, in (0, 1]."""

    probability: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_between("probability", self.probability, 0, 1)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        return _accept_set(keys, start, draft, target_probs, target_probs[:, :-1] >= self.probability)


def _accept_set(keys: Array, start: Array, draft: Draft, target_probs: Array, kept: Array) -> Verdict:
    """Keep every drafted token in the set ``kept[B, K, V]``, whatever its probability."""
    return _accept_up_to(keys, start, draft, target_probs, jnp.where(kept, jnp.inf, 0))


def _accept_up_to(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Array) -> Verdict:
    """`accept_tokens` with its receipt."""
    verdict = accept_tokens(keys, start, draft, target_probs, bound)
    excess = jnp.minimum(draft.probs, bound) - target_probs[:, :-1]
    distortion = jnp.where(excess > 0, excess, 0).sum(-1)
    return dataclasses.replace(verdict, distortion=jnp.pad(distortion, ((0, 0), (0, 1))))
