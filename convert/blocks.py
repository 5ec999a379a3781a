"""Packed matrices: weights that stay as a file stores them, with the outputs of a product interleaved.

GGUF stores each row of a matrix ``[out, in]`` as a sequence of blocks. A block holds 32 or 256 values, as integer codes
and scales in several fields. `interleave` puts the blocks of 16 rows into one tile, which stores each unit of 2 or 4
bytes for all 16 rows side by side. No bit changes. A product then has 16 outputs in the lanes of one vector, and reads
a tile from beginning to end.

Matrices of 16-bit floats have the same form, as if their blocks held one value each.
"""

import dataclasses
import math
from typing import TypeAlias

import numpy as np

from convert.errors import CheckpointError

LANES = 16


@dataclasses.dataclass(frozen=True)
class Field:
    """A part of a block.

    Attributes:
        name: what the field holds, as ggml names it.
        offset: the field's first byte in GGUF's block.
        nbytes: the field's size.
    """

    name: str
    offset: int
    nbytes: int

    @property
    def unit(self) -> int:
        """The number of bytes that are stored side by side for each row."""
        return 4 if self.nbytes % 4 == 0 else 2


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format of packed weights. A block holds `values` values in `fields`, which are stored in this order."""

    values: int
    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        """The size of a block of one row, in bytes."""
        return sum(field.nbytes for field in self.fields)


def _format(values: int, **sizes: int) -> BlockFormat:
    """Return a format whose fields have the order that they have in GGUF's blocks."""
    ends = np.cumsum([0, *sizes.values()])
    return BlockFormat(
        values, tuple(Field(name, int(at), size) for (name, size), at in zip(sizes.items(), ends[:-1], strict=True))
    )


def _sixth() -> BlockFormat:
    """Return Q6_K with its scales first, because a product needs them first."""
    low, high, scales, d = _format(256, ql=128, qh=64, scales=16, d=2).fields
    return BlockFormat(256, (d, scales, low, high))


# GGUF's names of tensor types. https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
FORMATS = {
    "BF16": _format(1, w=2),
    "F16": _format(1, w=2),
    "Q4_0": _format(32, d=2, qs=16),
    "Q4_1": _format(32, d=2, m=2, qs=16),
    "Q5_0": _format(32, d=2, qh=4, qs=16),
    "Q5_1": _format(32, d=2, m=2, qh=4, qs=16),
    "Q8_0": _format(32, d=2, qs=32),
    "Q4_K": _format(256, d=2, dmin=2, scales=12, qs=128),
    "Q5_K": _format(256, d=2, dmin=2, scales=12, qh=32, qs=128),
    "Q6_K": _sixth(),
}


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix ``[out, in]`` as a file stores it, in tiles of 16 rows.

    Attributes:
        format: a key of `FORMATS`.
        shape: ``(out, in)``.
        tiles: ``uint8[ceil(out / 16), 16 row_bytes]``. The rows that fill the last tile are zeros.
    """

    format: str
    shape: tuple[int, int]
    tiles: np.ndarray


# A matrix whose rows come from tensors of different formats.
StoredParts: TypeAlias = tuple[StoredMatrix, ...]


def row_bytes(name: str, width: int) -> int:
    """Return the size in bytes of a row of `width` values, or 0 if the format does not divide it into whole blocks."""
    form = FORMATS.get(name)
    return 0 if form is None or width % form.values else width // form.values * form.nbytes


def interleave(name: str, rows: np.ndarray) -> np.ndarray:
    """Return the tiles ``uint8[ceil(N / 16), 16 row_bytes]`` of the stored ``rows``, ``uint8[N, row_bytes]``."""
    form, (count, width) = FORMATS[name], rows.shape
    tiles = -(-count // LANES)
    if count % LANES:
        rows = np.pad(rows, ((0, -count % LANES), (0, 0)))
    blocks = rows.reshape(tiles, LANES, width // form.nbytes, form.nbytes)
    out = np.empty((tiles, blocks.shape[2], form.nbytes * LANES), np.uint8)
    at = 0
    for field in form.fields:
        part = blocks[..., field.offset : field.offset + field.nbytes]
        kind = np.dtype(f"u{field.unit}")
        target = out[..., at : at + LANES * field.nbytes].view(kind)
        target = target.reshape(tiles, blocks.shape[2], field.nbytes // field.unit, LANES)
        source = np.ascontiguousarray(part).view(kind)
        target[...] = np.moveaxis(source, 1, 3)
        at += LANES * field.nbytes
    return out.reshape(tiles, math.prod(out.shape[1:]))


def check_finite(name: str, rows: np.ndarray, tensor: str) -> None:
    """Reject stored rows ``uint8[N, row_bytes]`` whose weights are not finite, because of their scales or themselves.

    Raises:
        CheckpointError: a number of 16 bits is infinite or NaN.
    """
    form = FORMATS[name]
    halves = [field for field in form.fields if field.name in ("w", "d", "dmin", "m")]
    exponent = 0x7F80 if name == "BF16" else 0x7C00
    for field in halves:
        part = rows.reshape(-1, form.nbytes)[:, field.offset : field.offset + 2]
        if (np.ascontiguousarray(part).view("<u2") & exponent == exponent).any():
            raise CheckpointError(f"{tensor} has weights that are not finite; choose or make another file.")


def of_array(array: np.ndarray) -> StoredParts:
    """Return a matrix ``[out, in]`` of bfloat16 or float16 in tiles."""
    name = "F16" if array.dtype == np.float16 else "BF16"
    rows = np.ascontiguousarray(array).view(np.uint8)
    return (StoredMatrix(name, (array.shape[0], array.shape[1]), interleave(name, rows)),)
