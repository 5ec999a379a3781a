"""Helpers for the key tests and others."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from jspec.core import keys
from jspec.tuning.tune_chain import TRIALS

# Every position of a text, and the powers of two with their neighbours, where too narrow an integer would wrap.
POWERS = 1 << np.arange(13, 28)


POSITIONS = np.unique([*range(4096), *(POWERS - 1), *POWERS[:-1]]).astype(np.int32)


def repeated_streams():
    """Return how many of a request's streams repeat, including its trials and itself, and how many are distinct."""
    own = jax.random.split(jax.random.key(4), 1)
    streams = [keys.stream(own, jnp.asarray(POSITIONS)[None], purpose)[0] for purpose in keys.Purpose]
    # A round draws from keys that are made from such a stream in turn.
    rounds = [
        keys.stream(streams[purpose][:64], jnp.arange(64)[:, None] + jnp.arange(4), purpose).ravel()
        for purpose in (keys.Purpose.DRAFT, keys.Purpose.ACCEPT)
    ]
    trials = [keys.trial_keys(own, number) for number in range(TRIALS)]
    # Siblings and cousins in a tree, for a request and for such a round.
    grid = jnp.broadcast_to(jnp.arange(64), (64, 64))
    siblings = [
        keys.stream(keys.of_sibling(of, rank), grid[: len(of)], purpose).ravel()
        for rank in range(1, 5)
        for purpose in (keys.Purpose.DRAFT, keys.Purpose.ACCEPT)
        for of in (own, streams[purpose][:64])
    ]
    data = np.concatenate([jax.random.key_data(part) for part in (own, *streams, *rounds, *trials, *siblings)])
    distinct = len(np.unique(data, axis=0))
    return len(data) - distinct, distinct


# Keys whose random bits are all alike: every word equals the key itself.
CONSTANT = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.asarray(seed, jnp.uint32)[None],
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
    random_bits=lambda key, bit_width, shape: jnp.full(shape, key[0].astype(f"uint{bit_width}")),
    fold_in=lambda key, data: key,
    name="constant",
)


# The least value that the farthest noise must reach.
REACH = -np.log(np.finfo(np.float32).tiny) - 1 if jax.__version_info__ < (0, 12) else 46.5 * np.log(2)


def farthest_noise():
    """Return the largest possible Gumbel noise, which comes from bits that are all 0 or all 1."""
    extremes = jax.random.wrap_key_data(jnp.array([[0], [2**32 - 1]], jnp.uint32), impl=CONSTANT)
    noise = np.asarray(keys.gumbel(extremes, 9))
    assert np.isfinite(noise).all()
    return noise.max()
