"""Laws over a vocabulary: the leftover of a rejection, and drawing from a law. Dtype in, same dtype out."""

import functools

import jax
import jax.numpy as jnp
from jax import Array


def residual(target_probs: Array, draft_probs: Array) -> Array:
    """The law of the correction after a rejection: ``norm(max(p - q, 0))`` (Leviathan et al. 2023, section 2.3).

    Where nothing is left (p = q up to rounding, so a rejection has probability about 0) it is p itself. Entries of
    q that are NaN count as 0, entries of p that are NaN or negative are impossible.

    Args:
        target_probs: ``[..., V]``, p.
        draft_probs: ``[..., V]``, q.

    Returns:
        ``[..., V]``, summing to 1, or to 0 where p has no mass at all.
    """
    target_probs = jnp.where(target_probs > 0, target_probs, 0)
    left = jnp.where(draft_probs > 0, jnp.maximum(target_probs - draft_probs, 0), target_probs)
    left = jnp.where(left.sum(-1, keepdims=True) > 0, left, target_probs)
    return left / jnp.maximum(left.sum(-1, keepdims=True), jnp.finfo(left.dtype).tiny)


def sample(keys: Array, probs: Array) -> Array:
    """One token a row, drawn exactly from `probs`.

    Gumbel noise in mode "high": the default mode cannot draw tokens less likely than about 1e-7, and a cumulative
    sum in float32 loses the tail of a large vocabulary.

    Args:
        keys: typed keys ``[B]``; consumed.
        probs: ``float32[B, V]``. A row without mass gives token 0.

    Returns:
        ``int32[B]``.
    """
    draw = functools.partial(jax.random.categorical, mode="high")
    return jax.vmap(draw)(keys, jnp.log(probs)).astype(jnp.int32)


def at_tokens(probs: Array, tokens: Array) -> Array:
    """``probs[..., V]`` at ``tokens[...]``."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
