"""Rotary position embeddings: the frequency of each pair of dimensions, and the rotation itself."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from convert.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return ``float32[D / 2]``, the rotation per position, as in transformers. See `RopeConfig` for the kinds."""
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    frequencies = frequencies.astype(np.float32)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "yarn":
        return _yarn_frequencies(frequencies, rope)
    # llama3: long wavelengths are slowed by the factor, short ones are kept, and those in between are blended.
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_position_embeddings / wavelengths - low) / (high - low)
    blend = np.clip(blend, 0, 1)
    return ((1 - blend) * frequencies / rope.factor + blend * frequencies).astype(np.float32)


def _yarn_frequencies(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Return YaRN's frequencies (Peng et al. 2023, section 3.2), which lower only the low frequencies."""
    size = 2 * frequencies.size

    def dimension(turns: float) -> float:
        """Return the dimension that makes this many turns within the original context length."""
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    slowed = np.clip((np.arange(frequencies.size, dtype=np.float32) - low) / width, 0, 1)
    return (slowed * frequencies / rope.factor + (1 - slowed) * frequencies).astype(np.float32)


def rope_tables(positions: Array, rope: RopeConfig, head_dim: int) -> tuple[Array, Array]:
    """Return cosines and sines ``float32[B, 1, S, D / 2]`` for ``positions[B, S]``."""
    angles = positions[:, None, :, None].astype(jnp.float32) * rope_frequencies(rope, head_dim)[None, None, None]
    tables = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1:
        tables = tables[0] * rope.attention_factor, tables[1] * rope.attention_factor
    return tables


def rotate(x: Array, tables: tuple[Array, Array]) -> Array:
    """Rotate ``x[B, heads, S, D]``. Each pair has one dimension from each half of D, as in Hugging Face's layout."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
