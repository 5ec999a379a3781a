"""Lossy acceptance rules, which accept more than the target's distribution allows and report by how much.

A lossy rule is used only if the caller selects it. Each rule accepts a draft token x up to a bound above p(x), and
reports a distortion. At each position, the distortion is the total variation distance between the token's distribution
and the target's, given the text before it: ``sum_x max(min(q(x), bound(x)) - p(x), 0)``. Its sum over a request's
tokens is ``out.stats.distortion``. The mean of that sum over requests bounds the total variation distance between the
distributions of whole outputs. The bound also holds for trees, which `Lenient` and `Typical` can verify. Their
docstrings define the distortion at a single position of a tree.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance.base import Rule
from jspec.acceptance.rejection import accept_nodes, accept_tokens
from jspec.acceptance.walk import along, end_of, excess, follow, follow_longest, kept_in_turn, next_probs_at
from jspec.core.keys import Purpose, stream
from jspec.core.probs import sample
from jspec.core.types import Draft, Verdict, check_between, check_count


@dataclasses.dataclass(frozen=True)
class Lenient(Rule):
    """Lenient acceptance: no token becomes more than ``1 / leniency`` times as likely as under the target.

    This is the lenience of Leviathan et al. 2023, appendix A.5. The bound also holds in trees: each of several children
    is verified against ``1 / leniency`` times the target probability that remains after its earlier siblings. In a
    tree, the distortion at a position, averaged over drafts, is an upper bound on the total variation distance
    (`jspec.rules.kept_in_turn`).

    Attributes:
        leniency: l in (0, 1]. 1 is exact, and 0.1 lets a token become up to ten times as likely.
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
    """Typical acceptance: accept x if ``p(x) > min(epsilon, delta exp(-H(p)))``, where H is the entropy (Medusa).

    In a tree, the rule accepts the longest branch whose tokens all pass (Cai et al. 2024, section 3.2). See
    `accept_longest` for the distortion in a tree.

    Attributes:
        epsilon: a probability in (0, 1]. Tokens with a higher probability are always accepted.
        delta: a factor in (0, 1] that lowers the threshold if the target's entropy is high. Medusa's code uses
            epsilon = 0.09 and delta = 0.3.
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
    """Top-k acceptance: accept the target's k most likely tokens, and any tokens that tie with the k-th."""

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
    """Threshold acceptance: accept tokens whose target probability is at least `probability`, in (0, 1]."""

    probability: float
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_between("probability", self.probability, 0, 1)

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        return _accept_set(keys, start, draft, target_probs, target_probs[:, :-1] >= self.probability)


@dataclasses.dataclass(frozen=True)
class Relaxed(Rule):
    """Relaxed verification: accept the target's `beta` most likely tokens if they are within `tau` nats of the top one.

    This is the relaxed verification of SpecDec (Xia et al. 2023, section 3.2, which uses beta = 3 to 5 and tau = 1).

    Attributes:
        beta: the number of tokens, at least 1. Tokens that tie with the last one are included.
        tau: the largest accepted value of ``log max p - log p(x)``, above 0.
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
        top_probs = lax.top_k(p, min(self.beta, p.shape[-1]))[0]
        near = p >= top_probs[..., :1] * math.exp(-self.tau)
        return _accept_set(keys, start, draft, target_probs, (p >= top_probs[..., -1:]) & (p > 0) & near)


def accept_longest(
    keys: Array, start: Array, draft: Draft, target_probs: Array, keeps: Callable[[Array], Array]
) -> Verdict:
    """Accept the tree's longest branch whose tokens are all in the set ``keeps(p)``.

    The token after the branch is sampled from the part of p that remains after its children are rejected.

    The choice among siblings depends on the nodes below them, because a branch with more accepted tokens is preferred.
    A token's distribution, given the tokens before it, therefore has no simple form. The distortion instead compares
    the longest branch with the first branch, which takes the first accepted sibling at each node and may be shorter.
    Until the two branches diverge, positions have the distortion that `kept_in_turn` returns. The position where they
    diverge has distortion 1, which covers the rest of the round, plus the distortion of the rest of the first branch.
    Later positions have distortion 0.

    The summed distortion, averaged over requests, is an upper bound on the total variation distance between the
    distributions of whole outputs. The proof applies the triangle inequality round by round: the distributions of two
    rounds that differ with probability e are at most e apart. The distortion at a single position is not a bound.

    Args:
        keys, start, draft, target_probs: same as in `jspec.rules.Rule.accept`.
        keeps: a function that maps ``p[..., V]`` to the accepted set ``bool[..., V]``.
    """

    def bound(left: Array, p: Array) -> Array:
        return jnp.where(keeps(p), jnp.inf, 0)

    tree = draft.static_tree
    never = jnp.zeros((len(draft.tokens), tree.max_depth), target_probs.dtype)
    kept, distortion = kept_in_turn([never] * tree.max_children, draft, target_probs, bound)
    num_eldest, eldest = follow(kept, tree)
    num_accepted, path = follow_longest(kept, tree)
    probs = next_probs_at(end_of(num_accepted, path), draft, target_probs, bound)
    token = sample(stream(keys, start + num_accepted, Purpose.TARGET), probs)
    steps = jnp.arange(tree.max_depth + 1)
    paid = jnp.where(steps <= num_eldest[:, None], along(distortion, eldest), 0)
    apart = jnp.pad(jnp.cumsum(path != eldest, axis=1), ((0, 0), (0, 1)), mode="edge") > 0
    parting = apart & (jnp.cumsum(apart, axis=1) == 1)
    rest = 1 + jnp.where(apart, paid, 0).sum(1, keepdims=True)
    return Verdict(num_accepted, token, jnp.where(parting, rest, jnp.where(apart, 0, paid)), path)


def _accept_set(keys: Array, start: Array, draft: Draft, target_probs: Array, kept: Array) -> Verdict:
    """Accept every draft token in the set ``kept[B, K, V]``, whatever its probability."""
    return _accept_up_to(keys, start, draft, target_probs, jnp.where(kept, jnp.inf, 0))


def _accept_up_to(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Array) -> Verdict:
    """Run `accept_tokens` and add the distortion to its verdict."""
    verdict = accept_tokens(keys, start, draft, target_probs, bound)
    distortion = excess(jnp.minimum(draft.probs, bound), target_probs[:, :-1])
    return dataclasses.replace(verdict, distortion=jnp.pad(distortion, ((0, 0), (0, 1))))
