"""The only place random keys are made.

A request owns one key. Each random draw of it has its own stream, named by the absolute position of the token it is
for and by its purpose, so a request's text depends on its key and prompt alone: not on the batch, its slot in it, or
how many rounds came before. Two purposes never share a stream: under rejection, noise shared by the draft and the
correction biases the output. (The rule "coupled" drafts with the target's own noise, and decides by nothing else.)

A position that is judged again after a rejection before it reuses its streams. That is exact: the noise of position t
decides nothing before t, so it is still independent of all that has been committed when it is used again. Where that
does not hold, every round gets a key of its own: in drafting, for a drafter may remember what was discarded, and in
block verification, where the noise of later positions decides about earlier ones.
"""

import enum
import math

import jax
import jax.numpy as jnp
from jax import Array

# Numbers a position has for its purposes: more than there are, so that a new one changes no text of old seeds.
STRIDE = 16


@enum.unique
class Purpose(enum.IntEnum):
    """What a draw is for: 0 to `STRIDE` - 1."""

    DRAFT = 0
    ACCEPT = 1
    TARGET = 2  # what the target itself writes: a correction or a bonus, of which a position has one


def stream(keys: Array, positions: Array, purpose: Purpose) -> Array:
    """Keys of the draws for `purpose` at `positions`.

    Args:
        keys: typed PRNG keys ``[B]``, one a request.
        positions: ``int32[B]`` or ``int32[B, K]``, absolute index (prompt included) of the token to be drawn; below
            2^27, so that no number is met twice, nor by `trial_keys`.
        purpose: what they are for.

    Returns:
        Typed keys in the shape of `positions`.
    """

    numbers = STRIDE * positions + purpose
    # Positions are mapped inside rows: the other way round JAX's key-reuse checker takes the keys for copies.
    by_row = jax.random.fold_in if positions.ndim == 1 else jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(by_row)(keys, numbers)


def positions_from(start: Array, count: int) -> Array:
    """``int32[B, count]``, the positions from ``start[B]`` on."""
    return start[:, None] + jnp.arange(count)[None]


TRAINING = 2**16  # number of the trials whose texts drafters learn from, or are measured by; tuning has small ones


def trial_keys(keys: Array, number: int) -> Array:
    """Other keys ``[B]`` for a trial run, which no stream of a text reaches.

    What is learnt from a run with a request's own keys must not steer that request: that would bias its text.
    """
    return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(2**32 - 1 - number))


def of_sibling(keys: Array, rank: int) -> Array:
    """Keys for the node of this rank among siblings or cousins, which no stream of another reaches; 0 has the own."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(2**31 + rank)) if rank else keys


def uniform(keys: Array) -> Array:
    """One number in [0, 1) a key, in float32, with a resolution of 2^-56 near 0.

    `jax.random.uniform` has 2^-23, which accepts a token with p/q = 1e-8 twelve times too often. The result never
    rounds up to 1, so that p = q is always accepted.
    """
    words = jax.vmap(lambda key: jax.random.bits(key, (2,), "uint32"))(keys.ravel()).reshape(*keys.shape, 2)
    coarse = (words[..., 0] >> 8).astype(jnp.float32) * 2.0**-24
    fine = words[..., 1].astype(jnp.float32) * 2.0**-56
    return jnp.minimum(coarse + fine, 1 - 2.0**-24)


def gumbel(keys: Array, vocab_size: int) -> Array:
    """Return the Gumbel noise ``float32[..., 2, W]`` of keys ``[...]`` for `sample_with_noise`, where W^2 >= V.

    In mode "high": JAX's default cannot draw tokens below about 1e-7.
    """
    shape = 2, math.isqrt(vocab_size - 1) + 1
    noise = jax.vmap(lambda key: jax.random.gumbel(key, shape, jnp.float32, mode="high"))(keys.ravel())
    return noise.reshape(*keys.shape, *shape)


def target_noise(keys: Array, positions: Array, vocab_size: int) -> Array:
    """What the target draws the tokens at ``positions[B, S]`` with, where it draws them: ``float32[B, S, 2, W]``."""
    return gumbel(stream(keys, positions, Purpose.TARGET), vocab_size)


def draft_noise(keys: Array, positions: Array, vocab_size: int, width: int = 1) -> Array:
    """What a round that starts at ``positions[:, 0]`` draws its drafts with: ``float32[B, K, width, 2, W]``.

    Every round has a key of its own, for no two start at the same length: a position that is drafted again gets fresh
    noise, so a drafter may learn from all it has drafted, discarded or not, and stay exact. In a tree every node has
    its own: traversal looks at what is behind an elder child before it decides about the younger.
    """
    keys = stream(keys, positions[:, 0], Purpose.DRAFT)
    by_rank = [stream(of_sibling(keys, rank), positions, Purpose.DRAFT) for rank in range(width)]
    return jnp.stack([gumbel(keys, vocab_size) for keys in by_rank], axis=2)
