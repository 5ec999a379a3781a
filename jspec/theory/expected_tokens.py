"""Closed forms for chains: acceptance rate, expected tokens per round, speed-up and the best k."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = np.float64 | NDArray[np.float64]

# A float32 softmax over a 128k vocabulary sums to 1 within about 1e-5. An unnormalised row is off by far more.
_SUM_TOLERANCE = 1e-4


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> Floats:
    """Return the probability that target `p` accepts a token drafted from `q`: `sum_x min(p(x), q(x))`.

    This is beta in Leviathan et al., theorem 3.5, and beta_t in Stratos, section 1.1.1. It equals one minus the total
    variation distance. Its mean over contexts is alpha (corollary 3.6), which the other functions in this module
    take as an argument.

    Args:
        p: `[..., V]` target probabilities.
        q: `[..., V]` draft probabilities, the same shape as `p`.

    Returns:
        `[...]` float64 in [0, 1].

    Raises:
        ValueError: the shapes differ, an entry is negative or not finite, or a row's sum is not 1 within 1e-4.
    """
    target, draft = _distribution_pair(p, q)
    return np.minimum(np.minimum(target, draft).sum(axis=-1), 1.0)


def divergence(p: ArrayLike, q: ArrayLike) -> Floats:
    """Return `D_LK(p, q) = sum_x |p(x) - M(x)|` with `M = (p + q) / 2` (Leviathan et al., definition 3.2).

    This is the total variation distance: it is symmetric, 0 if `p = q`, and 1 for disjoint supports (corollary 3.4).

    Args:
        p: `[..., V]` target probabilities.
        q: `[..., V]` draft probabilities, the same shape as `p`.

    Returns:
        `[...]` float64 in [0, 1], equal to `1 - acceptance_rate(p, q)` (lemma 3.3).

    Raises:
        ValueError: under the same conditions as `acceptance_rate`.
    """
    target, draft = _distribution_pair(p, q)
    return np.minimum(0.5 * np.abs(target - draft).sum(axis=-1), 1.0)


def expected_tokens(alpha: ArrayLike, k: ArrayLike) -> Floats:
    """Return the mean number of tokens per round: `(1 - alpha^(k+1)) / (1 - alpha)` (Leviathan et al., equation 1).

    This assumes that acceptance at each position is independent and has the same rate. `expected_tokens_from_rates`
    drops that assumption.

    Args:
        alpha: `[...]` acceptance rates in [0, 1].
        k: `[...]` numbers of draft tokens per round, integers of at least 0.

    Returns:
        `[...]` float64 between 1 and `k + 1`. Both ends are reached exactly, at alpha = 0 and alpha = 1.

    Raises:
        ValueError: alpha is outside [0, 1] or NaN, k is negative or not an integer, or the shapes are incompatible.
    """
    rate, drafts = _broadcast(alpha=_rate("alpha", alpha), k=_count("k", k))
    # Apply Horner's scheme to the sum. The quotient would lose every digit as alpha -> 1. The sum loses none and needs
    # no special case there.
    total = np.ones(rate.shape)
    for step in range(int(drafts.max(initial=0))):
        total = np.where(step < drafts, 1.0 + rate * total, total)
    return total[()]


def expected_tokens_from_rates(rates: ArrayLike) -> Floats:
    """Return the mean number of tokens per round, given the acceptance rate at each position.

    The result is `1 + a_1 + a_1 a_2 + ... + a_1 ... a_K`, where `a_i` is the probability that draft token i is
    accepted, given that draft tokens 1 .. i-1 were accepted. Each product is the probability that draft token i is
    emitted, so the sum is also exact if positions depend on one another. Leviathan et al., equation 1, and Stratos,
    section 1.1.1, assume i.i.d. positions. If all `a_i` equal alpha, the result is `expected_tokens(alpha, K)`. The
    measured rates are `a_1 = accepted_at[0] / rounds` and `a_i = accepted_at[i - 1] / accepted_at[i - 2]`. Here arrays
    are indexed from 0 and positions from 1.

    Args:
        rates: `[..., K]` conditional acceptance rates in [0, 1].

    Returns:
        `[...]` float64 between 1 and K + 1.

    Raises:
        ValueError: a rate is outside [0, 1] or NaN, or `rates` is a scalar. If no round reached a position, its rate
            is 0 / 0: pass 0 instead.
    """
    conditional = _rate("rates", rates)
    if conditional.ndim == 0:
        raise ValueError("rates is a scalar; expected shape [..., K]: pass a sequence such as [0.8, 0.7].")
    return 1.0 + np.cumprod(conditional, axis=-1).sum(axis=-1)


def speedup(alpha: ArrayLike, k: ArrayLike, c: ArrayLike) -> Floats:
    """Return the wall-time improvement: `expected_tokens(alpha, k) / (k c + 1)` (Leviathan et al., theorem 3.8).

    This is the speedup relative to plain decoding, which emits one token per target step. The formula assumes that a
    target pass over k + 1 positions takes as long as a pass over a single position.

    Args:
        alpha: `[...]` acceptance rates in [0, 1].
        k: `[...]` numbers of draft tokens per round, integers of at least 0.
        c: `[...]` ratios of a draft step's time to a target step's time, at least 0.

    Returns:
        `[...]` float64. 1 means as fast as plain decoding, and k = 0 gives exactly 1.

    Raises:
        ValueError: under the same conditions as `expected_tokens`, or if c is negative or not finite.
    """
    rate, drafts, cost = _broadcast(alpha=_rate("alpha", alpha), k=_count("k", k), c=_cost("c", c))
    return expected_tokens(rate, drafts) / (drafts * cost + 1.0)


def speedup_lower_bound(alpha: ArrayLike, c: ArrayLike) -> Floats:
    """Return a lower bound on the speedup of the best k: `max(1, (1 + alpha) / (1 + c))` (Leviathan et al., cor. 3.9).

    The quotient is theorem 3.8 at k = 1, and it exceeds 1 if alpha > c. Otherwise, no k helps, and the best speedup is
    1, which is reached without drafting.

    Args:
        alpha: `[...]` acceptance rates in [0, 1].
        c: `[...]` ratios of a draft step's time to a target step's time, at least 0.

    Returns:
        `[...]` float64 of at least 1.

    Raises:
        ValueError: under the same conditions as `speedup`.
    """
    return np.maximum(1.0, speedup(alpha, 1, c))


def operations(alpha: ArrayLike, k: ArrayLike, c_hat: ArrayLike) -> Floats:
    """Return the increase in arithmetic: `(k c_hat + k + 1) / expected_tokens(alpha, k)` (Leviathan et al., thm. 3.11).

    This is the total number of operations, target and draft, relative to plain decoding. A rejected draft token wastes
    the work done on it and on every draft token after it. That work is the price of a speedup.

    Args:
        alpha: `[...]` acceptance rates in [0, 1].
        k: `[...]` numbers of draft tokens per round, integers of at least 0.
        c_hat: `[...]` ratios of the draft's operations per token to the target's, at least 0.

    Returns:
        `[...]` float64 of at least 1. k = 0 gives exactly 1.

    Raises:
        ValueError: under the same conditions as `speedup`, with c_hat in place of c.
    """
    rate, drafts, cost = _broadcast(alpha=_rate("alpha", alpha), k=_count("k", k), c_hat=_cost("c_hat", c_hat))
    return (drafts * cost + drafts + 1.0) / expected_tokens(rate, drafts)


def optimal_k(alpha: ArrayLike, c: ArrayLike, max_k: int = 64) -> int | NDArray[np.int64]:
    """Return the k in 0 .. max_k with the largest `speedup(alpha, k, c)` (Leviathan et al., section 3.5).

    0 means "do not speculate" and is the result if alpha <= c (corollary 3.9). Ties go to the smaller k. Free drafts
    (c = 0) always help. The result is then max_k, or the first k whose speedup equals that of max_k in float64.

    Args:
        alpha: `[...]` acceptance rates in [0, 1].
        c: `[...]` ratios of a draft step's time to a target step's time, at least 0.
        max_k: the largest k to consider.

    Returns:
        An int for scalar input, else `[...]` int64.

    Raises:
        ValueError: under the same conditions as `speedup`, or if max_k is not a single integer of at least 0.
    """
    rate, cost = _broadcast(alpha=_rate("alpha", alpha), c=_cost("c", c))
    limit = _count("max_k", max_k)
    if limit.ndim != 0:
        raise ValueError(f"max_k has shape {limit.shape}; expected one integer: call optimal_k once per limit.")
    best = np.argmax(speedup(rate[..., None], np.arange(int(limit) + 1), cost[..., None]), axis=-1)
    # Near alpha = c = 1 every k ties up to rounding, so use corollary 3.9 instead of the last bit.
    best = np.where(rate > cost, best, 0)
    return int(best) if best.ndim == 0 else best


def _distribution_pair(p: ArrayLike, q: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return `p` and `q` as validated float64 rows with the same shape `[..., V]`."""
    target, draft = _distribution("p", p), _distribution("q", q)
    if target.shape != draft.shape:
        raise ValueError(
            f"p has shape {target.shape} and q has shape {draft.shape}; expected one shape [..., V]: "
            "align the two vocabularies and batch axes first."
        )
    return target, draft


def _distribution(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """Return `value` as validated float64 rows, renormalised so that p = q has rate 1 despite float32 rounding."""
    probs = np.asarray(value, dtype=np.float64)
    if probs.ndim == 0 or probs.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {probs.shape}; expected [..., V] with V at least 1: pass whole distributions."
        )
    if not (np.isfinite(probs) & (probs >= 0)).all():
        raise ValueError(f"{name} has a negative or non-finite entry; expected probabilities: apply softmax to logits.")
    sums = probs.sum(axis=-1, keepdims=True)
    error = np.abs(sums - 1.0).max(initial=0.0)
    if error > _SUM_TOLERANCE:
        raise ValueError(
            f"{name} has a row whose sum is off by {error:.3g}; expected 1 within {_SUM_TOLERANCE:g}: "
            "normalise over the last axis."
        )
    return probs / sums


def _rate(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """Return `value` as float64, or raise ValueError unless it is in [0, 1]. NaN is also rejected."""
    rate = np.asarray(value, dtype=np.float64)
    valid = (rate >= 0) & (rate <= 1)
    if not valid.all():
        raise ValueError(
            f"{name} is {rate[~valid].flat[0]}; expected a rate in [0, 1]: divide the number of accepted draft "
            "tokens by the number verified."
        )
    return rate


def _cost(name: str, value: ArrayLike) -> NDArray[np.float64]:
    """Return `value` as float64, or raise ValueError unless it is finite and at least 0."""
    cost = np.asarray(value, dtype=np.float64)
    valid = np.isfinite(cost) & (cost >= 0)
    if not valid.all():
        raise ValueError(
            f"{name} is {cost[~valid].flat[0]}; expected a finite ratio of at least 0: "
            "divide the draft's cost by the target's."
        )
    return cost


def _count(name: str, value: ArrayLike) -> NDArray[np.int64]:
    """Return `value` as int64 of at least 0. Reject floats, because a rate passed as k would be truncated to 0."""
    count = np.asarray(value)
    if count.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {count.dtype}; expected integers of at least 0: pass int({name}).")
    if (count < 0).any():
        raise ValueError(f"{name} is {count.min()}; expected an integer of at least 0: use 0 for no speculation.")
    return count.astype(np.int64)


def _broadcast(**named: np.ndarray) -> tuple[np.ndarray, ...]:
    """Broadcast the arrays to a common shape, or raise an error that names each argument and its shape."""
    try:
        return np.broadcast_arrays(*named.values())
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in named.items())
        raise ValueError(
            f"shapes do not broadcast ({shapes}); expected compatible shapes: add axes of size 1."
        ) from None
