# pyright: strict, reportUnknownMemberType=false
"""Lossy acceptance rules, which accept more than the target's distribution allows and report how much more.

A lossy rule is used only if a caller names it. Each rule accepts a draft token x up to a bound above p(x), and reports
a distortion. At every position that is the total variation distance, given the text before it, between the token's
distribution and the target's, ``sum_x max(min(q(x), bound(x)) - p(x), 0)``. Its sum over a text is
``out.stats.distortion``. The mean of that sum over requests bounds the total variation distance of whole texts. The
bound also holds on trees, which `Lenient` and `Typical` verify; they document the distortion of a single position.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance.base import Rule
from jspec.acceptance.rejection import accept_nodes, accept_tokens
from jspec.acceptance.walk import along, end_of, excess, follow, follow_longest, kept_in_turn, law_behind
from jspec.core.keys import Purpose, stream
from jspec.core.probs import sample
from jspec.core.types import Draft, Verdict, check_between, check_count


@dataclasses.dataclass(frozen=True)
class Lenient(Rule):
    """A bound of ``1 / leniency`` on how much likelier a token gets (Leviathan et al. 2023, appendix A.5).

    No token is more than ``1 / leniency`` times as likely as under the target. The bound also holds in trees: each of
    several children is verified by ``1 / leniency`` times the probability that its elder siblings have left of the
    target's. In trees the distortion of a position is an upper bound, on average over drafts
    (`jspec.rules.kept_in_turn`).

    Attributes:
        leniency: l in (0, 1]; 1 is exact, 0.1 lets a token become ten times as likely.
    """

    leniency: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_between("leniency", self.leniency, 0, 1)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        if draft.topology.is_chain:
            return _accept_up_to(keys, start, draft, target_probs, target_probs[:, :-1] / self.leniency)
        return accept_nodes(keys, start, draft, target_probs, self._bound)

    def _bound(self, left: Array, p: Array) -> Array:
        return left / self.leniency


@dataclasses.dataclass(frozen=True)
class Typical(Rule):
    """Typical acceptance: accept x if ``p(x) > min(epsilon, delta exp(-H(p)))``, with H the entropy (Medusa).

    In a tree the rule takes the longest branch whose tokens are all accepted (Cai et al. 2024, section 3.2), with the
    distortion of `accept_longest`.

    Attributes:
        epsilon: in (0, 1], the probability that is always enough.
        delta: in (0, 1], lowers the threshold if the target's entropy is high. Medusa's code uses epsilon = 0.09 and
            delta = 0.3.
    """

    epsilon: float
    delta: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_between("epsilon", self.epsilon, 0, 1)
        check_between("delta", self.delta, 0, 1)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        if draft.topology.is_chain:
            return _accept_set(keys, start, draft, target_probs, self._keeps(target_probs[:, :-1]))
        return accept_longest(keys, start, draft, target_probs, self._keeps)

    def _keeps(self, p: Array) -> Array:
        entropy = -jnp.where(p > 0, p * jnp.log(p), 0).sum(-1, keepdims=True)
        return p > jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))


@dataclasses.dataclass(frozen=True)
class TopK(Rule):
    """Top-k acceptance: accept tokens among the target's k likeliest, or as likely as the last of them."""

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
    """Threshold acceptance: accept tokens with at least this target probability, in (0, 1]."""

    probability: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_between("probability", self.probability, 0, 1)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        return _accept_set(keys, start, draft, target_probs, target_probs[:, :-1] >= self.probability)


@dataclasses.dataclass(frozen=True)
class Relaxed(Rule):
    """Relaxed verification: accept tokens among the target's `beta` likeliest and at most `tau` nats below the top one.

    It is the relaxed verification of SpecDec (Xia et al. 2023, section 3.2, which uses beta = 3 to 5 and tau = 1).

    Attributes:
        beta: at least 1; a token as likely as the last of the `beta` tokens counts as one of them.
        tau: above 0, the largest ``log max p - log p(x)``.
    """

    beta: int
    tau: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("beta", self.beta)
        check_between("tau", self.tau, 0, math.inf)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        p = target_probs[:, :-1]
        likeliest = lax.top_k(p, min(self.beta, p.shape[-1]))[0]
        near = p >= likeliest[..., :1] * math.exp(-self.tau)
        return _accept_set(keys, start, draft, target_probs, (p >= likeliest[..., -1:]) & (p > 0) & near)


def accept_longest(
    keys: Array, start: Array, draft: Draft, target_probs: Array, keeps: Callable[[Array], Array]
) -> Verdict:
    """Accept the longest branch of a tree whose tokens are all in the set ``keeps(p)``.

    The token after the branch is sampled from the part of p that the rejection of the children there leaves.

    The choice among siblings depends on the nodes below each of them, because a branch with more accepted tokens wins.
    The distribution of a token, given those before it, therefore has no simple form. The distortion instead compares
    with the branch of the eldest accepted siblings, which is not chosen by its length. Along that branch, positions
    have the distortion of `kept_in_turn`. The position where the longest branch leaves it has 1 for the rest of the
    round, plus the distortion of the rest of the eldest branch. Later positions have 0.

    On average over requests, the sum over a text is an upper bound of the total variation distance of whole texts. The
    proof is the triangle inequality, round by round: two rounds that differ with probability e are at most e apart. The
    distortion of a single position is not a bound.

    Args:
        keys, start, draft, target_probs: as for `jspec.rules.Rule.accept`.
        keeps: maps ``p[..., V]`` to the set ``bool[..., V]``.
    """

    def bound(left: Array, p: Array) -> Array:
        return jnp.where(keeps(p), jnp.inf, 0)

    tree = draft.static_tree
    never = jnp.zeros((len(draft.tokens), tree.max_depth), target_probs.dtype)
    kept, distortion = kept_in_turn([never] * tree.max_children, draft, target_probs, bound)
    num_eldest, eldest = follow(kept, tree)
    num_accepted, path = follow_longest(kept, tree)
    law = law_behind(end_of(num_accepted, path), draft, target_probs, bound)
    token = sample(stream(keys, start + num_accepted, Purpose.TARGET), law)
    steps = jnp.arange(tree.max_depth + 1)
    paid = jnp.where(steps <= num_eldest[:, None], along(distortion, eldest), 0)
    apart = jnp.pad(jnp.cumsum(path != eldest, axis=1), ((0, 0), (0, 1)), mode="edge") > 0
    parting = apart & (jnp.cumsum(apart, axis=1) == 1)
    rest = 1 + jnp.where(apart, paid, 0).sum(1, keepdims=True)
    return Verdict(num_accepted, token, jnp.where(parting, rest, jnp.where(apart, 0, paid)), path)


def _accept_set(keys: Array, start: Array, draft: Draft, target_probs: Array, kept: Array) -> Verdict:
    """Accept every drafted token in the set ``kept[B, K, V]``, whatever its probability."""
    return _accept_up_to(keys, start, draft, target_probs, jnp.where(kept, jnp.inf, 0))


def _accept_up_to(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Array) -> Verdict:
    """Run `accept_tokens` and add its distortion."""
    verdict = accept_tokens(keys, start, draft, target_probs, bound)
    distortion = excess(jnp.minimum(draft.probs, bound), target_probs[:, :-1])
    return dataclasses.replace(verdict, distortion=jnp.pad(distortion, ((0, 0), (0, 1))))
