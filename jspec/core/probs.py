# pyright: reportUnknownArgumentType=false
"""Operations on distributions over a vocabulary: the residual after a rejection, and sampling.

Results keep the dtype of the input.
"""

import jax.numpy as jnp
from jax import Array

from jspec.core.keys import gumbel


def residual(target_probs: Array, draft_probs: Array) -> Array:
    """Return the distribution of the correction, ``norm(max(p - q, 0))`` (Leviathan et al. 2023, section 2.3).

    If the residual is zero (p = q up to rounding, so a rejection has probability about 0), return p itself. NaN entries
    of q count as 0. Tokens whose entry in p is NaN or negative get probability 0.

    Args:
        target_probs: ``[..., V]``, p.
        draft_probs: ``[..., V]``, q.

    Returns:
        ``[..., V]``, summing to 1, or to 0 if p has no mass at all.
    """
    target_probs = jnp.where(target_probs > 0, target_probs, 0)
    left = jnp.where(draft_probs > 0, jnp.maximum(target_probs - draft_probs, 0), target_probs)
    left = jnp.where(left.sum(-1, keepdims=True) > 0, left, target_probs)
    return left / jnp.maximum(left.sum(-1, keepdims=True), jnp.finfo(left.dtype).tiny)


def sample(keys: Array, probs: Array) -> Array:
    """Sample one token per row exactly from ``probs[B, V]``, as ``int32[B]``.

    The typed keys ``keys[B]`` are consumed; do not reuse them.
    """
    return sample_with_noise(gumbel(keys, probs.shape[-1]), probs)


def sample_with_noise(noise: Array, probs: Array) -> Array:
    """Sample a token exactly from `probs`, using `noise` as the only randomness.

    The vocabulary is split into about sqrt(V) blocks. The first draw chooses a block by its mass, and the second
    draw chooses a token within the block. This needs 2 sqrt(V) random numbers, not V. Probabilities are only summed, so
    even the rarest token keeps its probability to float32 precision. A cumulative sum over the vocabulary would lose
    the tail. With the same noise, similar distributions mostly yield the same token.

    Args:
        noise: ``float32[..., 2, W]``, from `jspec.core.keys.gumbel`.
        probs: ``float32[..., V]``. A row without mass results in token 0.

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
    """Return ``[..., V]``: the log-probability that `noise` samples each token from a distribution similar to `probs`.

    The first draw of `sample_with_noise` chooses a block, and the second draw chooses a token within the block. Each
    draw is approximated by a softmax over the values that it compares. A higher `sharpness` puts more weight on the
    token that `noise` samples from `probs` itself.
    """
    width = noise.shape[-1]
    blocks = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, -probs.shape[-1] % width)])
    blocks = blocks.reshape(*probs.shape[:-1], -1, width)
    by_mass = _log_softmax(sharpness * (jnp.log(blocks.sum(-1)) + noise[..., 0, : blocks.shape[-2]]))
    inside = _log_softmax(sharpness * (jnp.log(blocks) + noise[..., None, 1, :]))
    return (by_mass[..., None] + inside).reshape(*probs.shape[:-1], -1)[..., : probs.shape[-1]]


def _log_softmax(x: Array) -> Array:
    """Return the log-softmax of x; a row that is all -inf stays -inf."""
    largest = x.max(-1, keepdims=True)
    shifted = jnp.where(jnp.isfinite(largest), x - largest, -jnp.inf)
    return shifted - jnp.log(jnp.maximum(jnp.exp(shifted).sum(-1, keepdims=True), 1e-30))


def at_tokens(probs: Array, tokens: Array) -> Array:
    """Return the entries of ``probs[..., V]`` for ``tokens[...]``."""
    return jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
