"""Arguments for the kernels in `jspec.models.kernels`, and their results in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.models.kv_cache import visible

# Batch, tokens, heads, groups, head size, slots, row starts. Head ratios are 1, 3 and 4, with 128 slots per share.
ATTENTION = {
    "one token": (1, 1, 4, 4, 64, 40, [7]),
    "an empty cache": (1, 5, 6, 2, 128, 5, [0]),
    "ratio 3": (3, 5, 6, 2, 128, 200, [0, 63, 195]),
    "ratio 4": (3, 9, 4, 1, 64, 300, [1, 128, 250]),
    "whole blocks": (1, 2, 2, 2, 64, 256, [128]),
    "eight shares": (3, 2, 4, 1, 64, 1030, [1000, 3, 0]),
    "twelve shares": (1, 1, 3, 1, 128, 1600, [1500]),
    "rows to the brim": (1, 16, 8, 2, 64, 1100, [1084]),
}
# Batch, tokens, contracted size, result size. The parts are 16, 16 and 2, and sizes are not all powers of two.
NORM = {"16 parts": (1, 1, 96, 80), "several rows": (1, 5, 512, 96), "two parts": (3, 2, 70, 128)}


def attention_arguments(
    batch: int,
    tokens: int,
    heads: int,
    groups: int,
    size: int,
    slots: int,
    starts: list[int],
    dtype: Any = jnp.bfloat16,
) -> tuple[Any, ...]:
    """Return random arguments of `decode_attention`, with zeros in unfilled slots.

    NumPy generates the numbers, because on a device each new shape would require a compilation.

    Args:
        starts: the position at which the new tokens of each row start.
    """
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(np.dtype(dtype))

    angles = rng.uniform(0, 2 * np.pi, (batch, 1, tokens, size // 2)).astype(np.float32)
    keys, values = draw(batch, groups, size, slots), draw(batch, groups, slots, size)
    positions = np.array(starts, np.int32)[:, None] + np.arange(tokens, dtype=np.int32)
    caches = spoil(keys, values, positions, 0, 0)
    qkv = jnp.asarray(draw(batch, tokens, (heads + 2 * groups) * size))
    return qkv, (np.cos(angles), np.sin(angles)), *caches, jnp.asarray(positions), (heads, groups, size)


def spoil(keys: Any, values: Any, positions: Any, key: float = np.nan, value: float = 1e4) -> tuple[Array, Array]:
    """Return copies of the caches with `key` and `value` in all slots from the first new token onwards.

    No query may see these slots. A cache's values never contain NaN, because the XLA implementation cannot handle it.
    """
    keys, values = np.array(keys), np.array(values)
    after = np.arange(values.shape[2]) >= np.asarray(positions)[:, :1]
    np.copyto(keys, np.asarray(key, keys.dtype), where=after[:, None, None, :])
    np.copyto(values, np.asarray(value, values.dtype), where=after[:, None, :, None])
    return jnp.asarray(keys), jnp.asarray(values)


def exact_attention(
    qkv: Any, tables: tuple[Any, Any], keys: Any, values: Any, positions: Any, sizes: tuple[int, int, int]
) -> np.ndarray:
    """Return ``float64[B, S, H D]`` for caches that hold the new tokens. Queries are rounded after rotation."""
    (heads, groups, size), (batch, tokens, _) = sizes, qkv.shape
    q = np.asarray(qkv[..., : heads * size], np.float64).reshape(batch, tokens, heads, 2, -1).swapaxes(1, 2)
    cos, sin = (np.asarray(table, np.float64) for table in tables)
    first, second = q[..., 0, :], q[..., 1, :]
    q = np.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(qkv.dtype)
    q = q.astype(np.float64).reshape(batch, groups, -1, size)  # the heads of a group share its cache
    seen = np.tile(visible(positions, keys.shape[3]), (1, heads // groups, 1))[:, None]
    keys, values = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    with np.errstate(invalid="ignore"):  # unseen slots may be NaN
        scores = np.where(seen, q @ keys / np.sqrt(size), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = weights / weights.sum(-1, keepdims=True) @ values
    return mixed.reshape(batch, heads, tokens, size).swapaxes(1, 2).reshape(batch, tokens, -1)


def exact_head_norm(qkv: Any, norms: tuple[Any, Any], sizes: tuple[int, int, int], eps: float) -> np.ndarray:
    """Return `qkv` with the norms of each head's queries and keys applied, rounded where `RMSNorm` rounds."""
    heads, groups, size = sizes
    parts = np.array(qkv).reshape(*qkv.shape[:2], -1, size)
    for gamma, begin, end in ((norms[0], 0, heads), (norms[1], heads, heads + groups)):
        scaled = exact_norm(parts[:, :, begin:end], np.ones(size), eps).astype(parts.dtype)
        parts[:, :, begin:end] = scaled.astype(np.float64) * np.asarray(gamma, np.float64)
    return parts.reshape(qkv.shape)


def norm_arguments(
    batch: int, tokens: int, inner: int, size: int, seed: int = 0, dtype: Any = jnp.bfloat16
) -> tuple[Array, ...]:
    """Return random arguments of `project_add_norm`: stream, input, and the weights of product and norm."""
    rng = np.random.default_rng(seed)
    shapes = (batch, tokens, size), (batch, tokens, inner), (inner, size), (size,)
    x, mixed, weight, gamma = (rng.standard_normal(shape, np.float32).astype(np.dtype(dtype)) for shape in shapes)
    return tuple(map(jnp.asarray, (x, mixed / np.asarray(16, mixed.dtype), weight, gamma)))


def exact_sum(x: Array, inner: Array, weight: Array) -> np.ndarray:
    """Return ``float64[B, S, E]``, the residual stream after the block."""
    return np.asarray(x, np.float64) + np.asarray(inner, np.float64) @ np.asarray(weight, np.float64)


def exact_norm(stream: Array, gamma: Array, eps: float) -> np.ndarray:
    """Return ``float64[B, S, E]``, the norm of the rounded stream."""
    wide = np.asarray(stream, np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * np.asarray(gamma, np.float64)
