"""Random streams: no two draws share a stream, and a stream's noise reaches the rarest token."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import keys
from support.keys import POSITIONS, REACH, farthest_noise, repeated_streams


def test_draws_of_a_request_use_distinct_streams(report):
    repeated, distinct = repeated_streams()
    report(positions=len(POSITIONS), purposes=len(keys.Purpose), distinct=distinct, repeated=repeated)
    assert repeated == 0


def test_streams_are_distinct_across_requests_and_positions(report):
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


def test_every_purpose_fits_in_stride():
    numbers = {int(purpose) for purpose in keys.Purpose.__members__.values()}
    assert len(numbers) == len(keys.Purpose.__members__) and min(numbers) >= 0 and max(numbers) < keys.STRIDE == 16


def test_noise_reaches_the_rarest_token(report):
    """JAX's default noise ends at 16 and would never draw a token 17 nats below the most likely one in its block.

    Noise of mode "high" ends at 87, or, from JAX 0.12 on, at 32.6, which is a probability of 2^-47.
    """
    report(farthest_noise=f"{farthest_noise():.1f}", least_probability=f"{np.exp(-farthest_noise()):.0e}")
    assert farthest_noise() > REACH
