"""Several projections of the same input, which are stored as one matrix.

The matrix holds the projections side by side. If several devices share it, its columns are interleaved instead: shard i
of N consists of the i-th part of every projection. Each device then splits its own outputs without communication.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array


def split_outputs(y: Array, sizes: Sequence[int], num_shards: int) -> list[Array]:
    """Split the outputs ``[..., sum(sizes)]`` into those of each projection, ``[..., sizes[i]]``."""
    if num_shards == 1:
        return jnp.split(y, np.cumsum(sizes[:-1]), axis=-1)
    shards = y.reshape(*y.shape[:-1], num_shards, -1)
    parts = jnp.split(shards, np.cumsum(sizes[:-1]) // num_shards, axis=-1)
    return [part.reshape(*y.shape[:-1], size) for part, size in zip(parts, sizes, strict=True)]


def interleaved_order(sizes: Sequence[int], num_shards: int) -> np.ndarray:
    """Return ``int64[sum(sizes)]``: the side-by-side index of each column of the interleaved matrix."""
    starts = np.cumsum([0, *sizes[:-1]])
    parts = [start + np.arange(size).reshape(num_shards, -1) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate(parts, axis=1).ravel()
