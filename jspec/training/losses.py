# pyright: strict, reportUnknownMemberType=false
"""How far a draft's law q is from the target's p: what training makes small.

Leviathan et al. 2023, corollary 3.6: a token is accepted with probability ``sum min(p, q)``, which is one less the
total variation distance. The losses are those of Zhou et al. 2024, "DistillSpec", section 4, and the one that is made
of acceptance itself (arXiv 2602.23881, "LK losses").
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

_SLOPE = 3.0  # how soon "lk" turns from divergence to acceptance: lambda = exp(-3 alpha), as in the paper


def acceptance(log_p: Array, log_q: Array) -> Array:
    """``sum min(p, q)``, ``[...]`` of log-probabilities ``[..., D]``."""
    return jnp.exp(jnp.minimum(log_p, log_q)).sum(-1)


def _kl(log_p: Array, log_q: Array) -> Array:
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def _reverse_kl(log_p: Array, log_q: Array) -> Array:
    return _kl(log_q, log_p)


def _jsd(log_p: Array, log_q: Array) -> Array:
    """Jensen and Shannon's: half the divergence of each from their mean."""
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return (_kl(log_p, log_m) + _kl(log_q, log_m)) / 2


def _tvd(log_p: Array, log_q: Array) -> Array:
    return 1 - acceptance(log_p, log_q)


def _lk(log_p: Array, log_q: Array) -> Array:
    """Divergence while the two are far apart, where its gradient is strong; then the rejection probability."""
    refused = _tvd(log_p, log_q)
    weight = lax.stop_gradient(jnp.exp(-_SLOPE * (1 - refused)))
    return weight * _kl(log_p, log_q) + (1 - weight) * refused


LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "kl": _kl,
    "reverse-kl": _reverse_kl,
    "jsd": _jsd,
    "tvd": _tvd,
    "lk": _lk,
}


def log_probs(logits: Array) -> Array:
    """Log-probabilities, none of them so small that a product with it is NaN."""
    return jnp.maximum(jax.nn.log_softmax(logits.astype(jnp.float32)), -100.0)
