"""Random streams: no two draws share one, and the noise of a stream reaches the rarest token."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from jspec.core import keys
from jspec.tuning.tune_chain import TRIALS

# Every position of a text, each power of two and what is beside it: where a number that is too narrow begins anew.
POWERS = 1 << np.arange(13, 28)
POSITIONS = np.unique([*range(4096), *(POWERS - 1), *POWERS[:-1]]).astype(np.int32)


def repeated_streams():
    """How many streams of one request are met again, its trials and itself included, and how many there are."""
    own = jax.random.split(jax.random.key(4), 1)
    streams = [keys.stream(own, jnp.asarray(POSITIONS)[None], purpose)[0] for purpose in keys.Purpose]
    # A round draws from keys made of such a stream in turn.
    rounds = [keys.stream(streams[purpose][:64], jnp.arange(64)[:, None] + jnp.arange(4), purpose).ravel()
              for purpose in (keys.Purpose.DRAFT, keys.Purpose.ACCEPT)]  # fmt: skip
    trials = [keys.trial_keys(own, number) for number in range(TRIALS)]
    # Siblings and cousins in a tree, of a request and of such a round.
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


def test_no_two_draws_of_a_request_share_a_stream(report):
    repeated, distinct = repeated_streams()
    report(positions=len(POSITIONS), purposes=len(keys.Purpose), distinct=distinct, repeated=repeated)
    assert repeated == 0


def test_streams_of_requests_are_distinct_and_those_of_one_position_are_those_of_many(report):
    requests, positions, purposes = 64, 96, list(keys.Purpose)
    row_keys = jax.random.split(jax.random.key(4), requests)
    grid = jnp.tile(jnp.arange(positions), (requests, 1))
    streams = jnp.stack([keys.stream(row_keys, grid, purpose) for purpose in purposes])
    data = np.asarray(jax.random.key_data(streams)).reshape(-1, 2)
    distinct = len(np.unique(data, axis=0))
    report(requests=requests, positions=positions, purposes=len(purposes), streams=len(data), distinct=distinct)
    assert distinct == len(data)
    by_row = keys.stream(row_keys, grid[:, 7], keys.Purpose.TARGET)
    np.testing.assert_array_equal(jax.random.key_data(by_row), jax.random.key_data(streams[keys.Purpose.TARGET, :, 7]))


def test_there_is_room_for_every_purpose():
    numbers = {int(purpose) for purpose in keys.Purpose.__members__.values()}
    assert len(numbers) == len(keys.Purpose.__members__) and min(numbers) >= 0 and max(numbers) < keys.STRIDE == 16


# Keys whose random bits are all alike: word for word what the key itself is.
CONSTANT = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.asarray(seed, jnp.uint32)[None],
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
    random_bits=lambda key, bit_width, shape: jnp.full(shape, key[0].astype(f"uint{bit_width}")),
    fold_in=lambda key, data: key,
    name="constant",
)


# The least that the farthest noise must be.
REACH = -np.log(np.finfo(np.float32).tiny) - 1 if jax.__version_info__ < (0, 12) else 46.5 * np.log(2)


def farthest_noise():
    """The largest Gumbel noise that there is: it comes from bits that are all 0 or all 1."""
    extremes = jax.random.wrap_key_data(jnp.array([[0], [2**32 - 1]], jnp.uint32), impl=CONSTANT)
    noise = np.asarray(keys.gumbel(extremes, 9))
    assert np.isfinite(noise).all()
    return noise.max()


def test_noise_reaches_the_rarest_token(report):
    """In JAX's default mode it ends at 16: a token 17 nats behind the likeliest of its block would never be drawn.

    In mode "high" it ends at 87, from JAX 0.12 on at 32.6, which is a probability of 2^-47.
    """
    report(farthest_noise=f"{farthest_noise():.1f}", least_probability=f"{np.exp(-farthest_noise()):.0e}")
    assert farthest_noise() > REACH
