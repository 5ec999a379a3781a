"""Distances between a draft's distribution q and the target's p, which training minimises.

Leviathan et al. 2023, corollary 3.6: a token is accepted with probability ``sum min(p, q)``, which is one minus the
total variation distance. The losses are those of Zhou et al. 2024, "DistillSpec", section 4, and one based on the
acceptance rate itself (arXiv 2602.23881, "LK losses"). "dspark" is that of DSpark (arXiv 2607.05147).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

_SLOPE = 3.0  # how quickly "lk" shifts from divergence to acceptance: lambda = exp(-3 alpha)


def acceptance(log_p: Array, log_q: Array) -> Array:
    """Return ``sum min(p, q)``, ``[...]``, from log-probabilities ``[..., D]``."""
    return jnp.exp(jnp.minimum(log_p, log_q)).sum(-1)


def covered_acceptance(log_p: Array, log_q: Array, covered: Array) -> Array:
    """Return the acceptance rate if p's tokens have only the share ``covered[...]`` of the whole distribution."""
    return acceptance(log_p + jnp.log(covered)[..., None], log_q)


def _kl(log_p: Array, log_q: Array) -> Array:
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def _reverse_kl(log_p: Array, log_q: Array) -> Array:
    return _kl(log_q, log_p)


def _jsd(log_p: Array, log_q: Array) -> Array:
    """Return the Jensen-Shannon divergence: the average of both distributions' divergences from their mean."""
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2


def _tvd(log_p: Array, log_q: Array) -> Array:
    return 1 - acceptance(log_p, log_q)


Mean = Callable[[Array], Array]
Loss = Callable[[Array, Array, Array, Mean], Array]


def _mean_of(divergence: Callable[[Array, Array], Array]) -> Loss:
    """Weight the divergence by coverage, because a draft that covers little of the distribution can learn little."""
    return lambda log_p, log_q, covered, mean: mean(covered * divergence(log_p, log_q))


def _lk(log_p: Array, log_q: Array, covered: Array, mean: Mean) -> Array:
    """Return a weighted mean of the divergence and the rejection rate.

    The weight of the divergence is highest at low acceptance rates, at which it has the stronger gradient.
    """
    accepted = mean(covered_acceptance(log_p, log_q, covered))
    weight = lax.stop_gradient(jnp.exp(-_SLOPE * accepted))
    return weight * mean(covered * _kl(log_p, log_q)) + (1 - weight) * (1 - accepted)


def _dspark(log_p: Array, log_q: Array, covered: Array, mean: Mean) -> Array:
    """Return .1 times the divergence plus .9 times the L1 distance, which is twice the rejection rate.

    DSpark uses the cross-entropy with the text's own tokens in place of the divergence. If the target sampled the text,
    both gradients have the same expectation, and the divergence's has less variance.
    """
    rejected = 1 - mean(covered_acceptance(log_p, log_q, covered))
    return 0.1 * mean(covered * _kl(log_p, log_q)) + 1.8 * rejected


# Each loss is a function that returns a scalar. Its arguments are the log-probabilities ``[..., D]`` of p and of q over
# the draftable tokens, the share ``covered[...]`` of the target's whole distribution that these tokens have, and a
# function that averages over the tokens to learn.
LOSSES: dict[str, Loss] = {
    "kl": _mean_of(_kl),
    "reverse-kl": _mean_of(_reverse_kl),
    "jsd": _mean_of(_jsd),
    "tvd": _mean_of(_tvd),
    "lk": _lk,
    "dspark": _dspark,
}


def log_probs(logits: Array) -> Array:
    """Return log-probabilities, clipped so that no product with them is NaN."""
    return jnp.maximum(jax.nn.log_softmax(logits.astype(jnp.float32)), -100.0)
