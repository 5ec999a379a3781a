"""Packed and quantised matrices. Each is a list of parts that hold consecutive outputs."""

from collections.abc import Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jspec.models.packed import PackedMatrix
from jspec.models.quantized_matrix import QuantizedMatrix

MatrixPart: TypeAlias = PackedMatrix | QuantizedMatrix


def multiply(parts: Sequence[MatrixPart], x: Array) -> Array:
    """Return the product ``float32[..., out]`` for ``x[..., in]``."""
    return jnp.concatenate([part.multiply(x) for part in parts], axis=-1)


def widen(parts: Sequence[MatrixPart]) -> Array:
    """Return the matrix as ``float32[out, in]``."""
    return jnp.concatenate([part.widen() for part in parts])


def take(parts: Sequence[MatrixPart], rows: ArrayLike) -> Array:
    """Return the weights ``float32[..., in]`` of the tokens ``rows[...]``. An embedding is always a single matrix."""
    (part,) = parts
    return part.take(rows)


def select(parts: Sequence[MatrixPart], rows: ArrayLike) -> list[MatrixPart]:
    """Return a matrix with only the outputs of the tokens ``rows[D]``. An embedding is always a single matrix."""
    (part,) = parts
    return [part.select(rows)]
