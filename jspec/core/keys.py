# pyright: reportUnknownArgumentType=false
"""Derivation of all random keys. No other module creates keys.

A request owns one key. Each of its random draws has its own stream, identified by the token's absolute position and the
purpose of the draw. A request's output therefore depends only on its key and prompt. It does not depend on the batch,
the request's slot in it, or the number of earlier rounds.

Two purposes never share a stream: under rejection, noise shared by the draft and the correction would bias the output.
(The rule "coupled" drafts with the target's own noise, and uses no other noise to accept tokens.)

A position reuses its streams if it is verified again after an earlier rejection. The output stays exact, because the
noise at position t affects nothing before t and is still independent of all committed tokens. For draws to which this
does not apply, each round gets its own key. Drafting needs such a key, because a drafter may remember discarded tokens.
Block verification needs one, because the noise at later positions affects earlier positions.
"""

import enum
import math

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.threefry import with_unrolled_hash

# The number of streams reserved per position. There are fewer purposes, so a new purpose changes no seed's output.
STRIDE = 16


@enum.unique
class Purpose(enum.IntEnum):
    """The purpose of a draw: 0 to `STRIDE` - 1."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2  # the target's own token: a correction or a bonus; no position has both


def stream(keys: Array, positions: Array, purpose: Purpose) -> Array:
    """Return the keys of the draws for `purpose` at `positions`.

    Args:
        keys: typed PRNG keys ``[B]``, one per request.
        positions: ``int32[B]`` or ``int32[B, K]``, the absolute index (prompt included) of the token to sample. It
            must be below 2^27, so that no stream number repeats or collides with `trial_keys`.
        purpose: the purpose of the draws.

    Returns:
        Typed keys in the shape of `positions`, with the hash of `jspec.core.threefry`.
    """
    keys, numbers = with_unrolled_hash(keys), STRIDE * positions + purpose
    # Map positions inside rows. In the other order, JAX's key-reuse checker would treat the keys as copies.
    by_row = jax.random.fold_in if positions.ndim == 1 else jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(by_row)(keys, numbers)


def positions_from(start: Array, count: int) -> Array:
    """Return ``int32[B, count]``: `count` consecutive positions starting at ``start[B]``."""
    return start[:, None] + jnp.arange(count)[None]


TRAINING = 2**16  # trial number for text that trains or measures drafters; tuning uses small numbers


def trial_keys(keys: Array, number: int) -> Array:
    """Return separate keys ``[B]`` for a trial run, which share no stream with generation.

    Results of a run with a request's own keys must not influence that request, because they would bias its output.
    """
    return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(2**32 - 1 - number))


def of_sibling(keys: Array, rank: int) -> Array:
    """Return keys with unique streams for a node of this rank among siblings or cousins. Rank 0 has those of `keys`."""
    keys = with_unrolled_hash(keys)
    return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(2**31 + rank)) if rank else keys


def uniform(keys: Array) -> Array:
    """Return one float32 in [0, 1) per key, with a resolution of 2^-56 near 0.

    The resolution of `jax.random.uniform` is only 2^-23, so a token with p/q = 1e-8 would be accepted twelve times as
    often as it should be. The result never rounds up to 1, so p = q is always accepted.
    """
    words = jax.vmap(lambda key: jax.random.bits(key, (2,), "uint32"))(keys.ravel()).reshape(*keys.shape, 2)
    coarse = (words[..., 0] >> 8).astype(jnp.float32) * 2.0**-24
    fine = words[..., 1].astype(jnp.float32) * 2.0**-56
    return jnp.minimum(coarse + fine, 1 - 2.0**-24)


def gumbel(keys: Array, vocab_size: int) -> Array:
    """Return Gumbel noise ``float32[..., 2, W]`` from keys ``[...]`` for `sample_with_noise`, with W^2 >= V.

    The mode is "high", because JAX's default mode cannot sample tokens with a probability below about 1e-7.
    """
    shape = 2, math.isqrt(vocab_size - 1) + 1
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape, jnp.float32, mode="high"))(keys.ravel())
    return noise.reshape(*keys.shape, *shape)


def target_noise(keys: Array, positions: Array, vocab_size: int) -> Array:
    """Return ``float32[B, S, 2, W]``, the noise that the target uses to sample its tokens at ``positions[B, S]``."""
    return gumbel(stream(keys, positions, Purpose.TARGET), vocab_size)


def draft_noise(keys: Array, positions: Array, vocab_size: int, width: int = 1) -> Array:
    """Return ``float32[B, K, width, 2, W]``, the draft noise of a round that starts at ``positions[:, 0]``.

    Every round has its own key, because no two rounds start at the same length. A position that is drafted again gets
    fresh noise. A drafter may thus learn from all its drafts, discarded or not, without biasing the output. In a tree
    every node has its own noise, because traversal visits the nodes below an earlier child before it verifies a later
    one.
    """
    keys = stream(keys, positions[:, 0], Purpose.DRAFT)
    by_rank = [stream(of_sibling(keys, rank), positions, Purpose.DRAFT) for rank in range(width)]
    return jnp.stack([gumbel(keys, vocab_size) for keys in by_rank], axis=2)
