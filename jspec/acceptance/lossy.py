# pyright: strict, reportUnknownMemberType=false
"""Lossy acceptance rules: they accept more than the target's law allows, and say how much more.

None is reachable without being named. Each accepts a token x of the draft up to a bound above p(x), and returns a
receipt: at every position the total variation distance, given the text before it, between the law of the token and the
target's, ``sum_x max(min(q(x), bound(x)) - p(x), 0)``. Its sum over a text is ``out.stats.distortion``, whose mean over
requests bounds the total variation distance of whole texts. On a tree, which `Lenient` and `Typical` judge, that bound
holds as well; what a single position has is said there.
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
    """No token is more than ``1 / leniency`` times as likely as under the target (Leviathan et al. 2023, appendix A.5).

    Of several children each is judged by ``1 / leniency`` of what its elder siblings have left of the target's law, so
    that this holds in trees, too. There the receipt of a position is right on average over drafts, and an upper bound
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
    """Typical acceptance: keep x where ``p(x) > min(epsilon, delta exp(-H(p)))``, H being entropy (Medusa).

    Of a tree the longest branch is taken in which all is kept (Cai et al. 2024, section 3.2); its receipts are those
    of `accept_longest`.

    Attributes:
        epsilon: in (0, 1], the probability that is always enough.
        delta: in (0, 1], how much less is enough where the target is undecided. Medusa's code: 0.09 and 0.3.
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


@dataclasses.dataclass(frozen=True)
class Relaxed(Rule):
    """Keep what is among the target's `beta` likeliest tokens and at most `tau` nats behind the likeliest.

    The relaxed verification of SpecDec (Xia et al. 2023, section 3.2, which uses beta = 3 to 5 and tau = 1).

    Attributes:
        beta: at least 1; a token as likely as the last of them counts as one.
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
    """Of a tree the longest branch whose tokens are all in the set ``keeps(p)``; then what their refusal leaves of p.

    Which sibling is taken depends on what lies behind each, so that the law of a token, given those before it, has no
    simple form: the branch was chosen because more of it was kept. So the receipt compares with the branch of the
    eldest kept siblings, where that is not so. Along that one the positions have the receipts of `kept_in_turn`. Where
    the longest branch leaves it, 1 is added for the rest of the round, together with those of the rest of the other;
    the positions behind have 0. The sum over a text, on average over requests, is an upper bound of the total variation
    distance of whole texts, by the triangle inequality round by round: two rounds that differ with probability e are at
    most e apart. A single position's is not one.

    Args:
        keys, start, draft, target_probs: as for `jspec.rules.Rule.accept`.
        keeps: of ``p[..., V]`` the set ``bool[..., V]``.
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
    """Keep every drafted token in the set ``kept[B, K, V]``, whatever its probability."""
    return _accept_up_to(keys, start, draft, target_probs, jnp.where(kept, jnp.inf, 0))


def _accept_up_to(keys: Array, start: Array, draft: Draft, target_probs: Array, bound: Array) -> Verdict:
    """`accept_tokens` with its receipt."""
    verdict = accept_tokens(keys, start, draft, target_probs, bound)
    distortion = excess(jnp.minimum(draft.probs, bound), target_probs[:, :-1])
    return dataclasses.replace(verdict, distortion=jnp.pad(distortion, ((0, 0), (0, 1))))
