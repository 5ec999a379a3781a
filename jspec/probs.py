"""Laws over a vocabulary: the leftover of a rejection, and drawing from a law. Dtype in, same dtype out."""

import math

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

    The vocabulary is cut into about sqrt(V) blocks; a block is drawn by its mass, then a token in it. That needs
    2 sqrt(V) random numbers, not V, and sums of probabilities are the only arithmetic, so the rarest token keeps its
    share to float32 precision; a cumulative sum over the vocabulary would lose the tail.

    Args:
        keys: typed keys ``[B]``; consumed.
        probs: ``float32[B, V]``. A row without mass gives token 0.

    Returns:
        ``int32[B]``.
    """
    return jax.vmap(_sample)(keys, probs)


def _sample(key: Array, probs: Array) -> Array:
    """`sample` for one row, unbatched."""
    width = math.isqrt(probs.size - 1) + 1
    blocks = jnp.pad(probs, (0, -probs.size % width)).reshape(-1, width)
    block_key, token_key = jax.random.split(key)
    block = _draw(block_key, blocks.sum(1))
    return (block * width + _draw(token_key, blocks[block])).astype(jnp.int32)


def _draw(key: Array, mass: Array) -> Array:
    """An index drawn by ``mass[N]``. Gumbel noise in mode "high": the default cannot draw below about 1e-7."""
    return jax.random.categorical(key, jnp.log(mass), mode="high")


def at_tokens(probs: Array, tokens: Array) -> Array:
    """``probs[..., V]`` at ``tokens[...]``."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
