"""Laws over a vocabulary: the leftover of a rejection, and drawing from a law. Dtype in, same dtype out."""

import jax.numpy as jnp
from jax import Array

from jspec.core.keys import gumbel


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
    """One token a row, ``int32[B]``, drawn exactly from ``probs[B, V]`` with typed keys ``[B]``, which are consumed."""
    return sample_with_noise(gumbel(keys, probs.shape[-1]), probs)


def sample_with_noise(noise: Array, probs: Array) -> Array:
    """The token that `noise` draws from `probs`, exactly.

    The vocabulary is cut into about sqrt(V) blocks; a block is drawn by its mass, then a token in it. That needs
    2 sqrt(V) random numbers, not V, and sums of probabilities are the only arithmetic, so the rarest token keeps its
    share to float32 precision; a cumulative sum over the vocabulary would lose the tail. With the same noise, laws that
    are alike mostly give the same token.

    Args:
        noise: ``float32[..., 2, W]``, from `jspec.core.keys.gumbel`.
        probs: ``float32[..., V]``. A row without mass gives token 0.

    Returns:
        ``int32[...]``.
    """
    width = noise.shape[-1]
    blocks = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, -probs.shape[-1] % width)])
    blocks = blocks.reshape(*probs.shape[:-1], -1, width)
    by_mass = jnp.log(blocks.sum(-1)) + noise[..., 0, : blocks.shape[-2]]
    block = jnp.argmax(by_mass, axis=-1).astype(jnp.int32)
    inside = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    token = jnp.argmax(jnp.log(inside) + noise[..., 1, :], axis=-1).astype(jnp.int32)
    return block * width + token


def foreseen(noise: Array, probs: Array, sharpness: float) -> Array:
    """How likely each token is to be what `noise` draws from a law like `probs`: log-probabilities ``[..., V]``.

    The first of the two draws of `sample_with_noise` is among blocks, the second within one; each is taken for a
    softmax of what it compares. The sharper they are, the surer it is the token drawn from `probs` itself.
    """
    width = noise.shape[-1]
    blocks = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, -probs.shape[-1] % width)])
    blocks = blocks.reshape(*probs.shape[:-1], -1, width)
    by_mass = _log_softmax(sharpness * (jnp.log(blocks.sum(-1)) + noise[..., 0, : blocks.shape[-2]]))
    inside = _log_softmax(sharpness * (jnp.log(blocks) + noise[..., None, 1, :]))
    return (by_mass[..., None] + inside).reshape(*probs.shape[:-1], -1)[..., : probs.shape[-1]]


def _log_softmax(x: Array) -> Array:
    """That of x, and -inf everywhere where x is."""
    largest = x.max(-1, keepdims=True)
    shifted = jnp.where(jnp.isfinite(largest), x - largest, -jnp.inf)
    return shifted - jnp.log(jnp.maximum(jnp.exp(shifted).sum(-1, keepdims=True), 1e-30))


def at_tokens(probs: Array, tokens: Array) -> Array:
    """``probs[..., V]`` at ``tokens[...]``."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
