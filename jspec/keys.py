"""The only place random keys are made.

A request owns one key. Each random draw of it has its own stream, named by the absolute position of the token it is
for and by its purpose, so a request's text depends on its key and prompt alone: not on the batch, its slot in it, or
how many rounds came before. Two purposes never share a stream: noise shared by the draft and the correction biases
the output.

A position that is judged again after a rejection before it reuses its streams. That is exact: the noise of position t
decides nothing before t, so it is still independent of all that has been committed when it is used again. Drafting is
different, for a drafter may remember what was discarded: it gets a key of its own every round (`jspec.round`).
"""

import enum

import jax
import jax.numpy as jnp
from jax import Array


class Purpose(enum.IntEnum):
    """What a draw is for."""

    DRAFT = 0
    ACCEPT = 1
    CORRECTION = 2
    BONUS = 3


def stream(keys: Array, positions: Array, purpose: Purpose | Array) -> Array:
    """Keys of the draws for `purpose` at `positions`.

    Args:
        keys: typed PRNG keys ``[B]``, one a request.
        positions: ``int32[B]`` or ``int32[B, K]``, absolute index (prompt included) of the token to be drawn.
        purpose: one `Purpose`, or one a row, ``int32[B]``.

    Returns:
        Typed keys in the shape of `positions`.
    """

    def row(key: Array, position: Array, purpose: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, position), purpose)

    # Positions are mapped inside rows: the other way round JAX's key-reuse checker takes the keys for copies.
    by_row = row if positions.ndim == 1 else jax.vmap(row, (None, 0, None))
    return jax.vmap(by_row)(keys, positions, jnp.broadcast_to(jnp.asarray(purpose), keys.shape))


def rehearsal(keys: Array, number: int) -> Array:
    """Other keys ``[B]`` for a trial run, which no position of a text reaches.

    What is learnt from a run with a request's own keys must not steer that request: that would bias its text.
    """
    return jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(2**32 - 1 - number))


def uniform(keys: Array) -> Array:
    """One number in [0, 1) a key, in float32, with a resolution of 2^-56 near 0.

    `jax.random.uniform` has 2^-23, which accepts a token with p/q = 1e-8 twelve times too often. The result never
    rounds up to 1, so that p = q is always accepted.
    """
    words = jax.vmap(lambda key: jax.random.bits(key, (2,), "uint32"))(keys.ravel()).reshape(*keys.shape, 2)
    coarse = (words[..., 0] >> 8).astype(jnp.float32) * 2.0**-24
    fine = words[..., 1].astype(jnp.float32) * 2.0**-56
    return jnp.minimum(coarse + fine, 1 - 2.0**-24)
