"""Packed matrices: weights in the form in which a file stores them, with 16 rows interleaved.

GGUF stores each row of a matrix ``[out, in]`` as a sequence of blocks. A block holds 32 or 256 values, as integer codes
and scales in several fields. `interleave` combines the blocks of 16 rows into one tile. A tile stores the rows' units
of 2 or 4 bytes side by side. No bit changes. A product then computes 16 outputs in the lanes of one vector, and reads
each tile from beginning to end.

Matrices of 16-bit floats have the same form, with one value per block.
"""

import dataclasses
from typing import TypeAlias

import numpy as np

from convert.errors import CheckpointError

LANES = 16
_HUGE_PAGE = 2 << 20  # the usual size on Linux
_ALIGNMENT = 64  # that of JAX's own arrays on CPU
_EXPONENT = 0x7C00  # all ones in a float16 that is not finite


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
        """The number of bytes of one row that stay together in a tile."""
        return 4 if self.nbytes % 4 == 0 else 2


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A format of packed weights. A block holds `values` values. A tile stores `fields` in the order given here."""

    values: int
    fields: tuple[Field, ...]

    @property
    def nbytes(self) -> int:
        """The size of a block of one row, in bytes."""
        return sum(field.nbytes for field in self.fields)


def _format(values: int, **sizes: int) -> BlockFormat:
    """Return a format whose fields are in the order of GGUF's blocks."""
    ends = np.cumsum([0, *sizes.values()])
    return BlockFormat(
        values, tuple(Field(name, int(at), size) for (name, size), at in zip(sizes.items(), ends[:-1], strict=True))
    )


def _q6_k() -> BlockFormat:
    """Return Q6_K with its scales before its codes, because a product reads the scales first."""
    low, high, scales, d = _format(256, ql=128, qh=64, scales=16, d=2).fields
    return BlockFormat(256, (d, scales, low, high))


# The keys are GGUF's names of tensor types. See https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
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
    "Q6_K": _q6_k(),
}


@dataclasses.dataclass(frozen=True)
class StoredMatrix:
    """A matrix ``[out, in]`` as a file stores it, in tiles of 16 rows.

    Attributes:
        format: a key of `FORMATS`.
        shape: ``(out, in)``.
        tiles: ``uint8[ceil(out / 16), 16 row_bytes]``. Rows of zeros fill the last tile.
    """

    format: str
    shape: tuple[int, int]
    tiles: np.ndarray


# The parts of a matrix, in order. Tensors of different formats form different parts.
StoredParts: TypeAlias = tuple[StoredMatrix, ...]


def row_bytes(name: str, width: int) -> int:
    """Return the bytes in a row of `width` values; 0 if the format is unknown or the row is not whole blocks."""
    form = FORMATS.get(name)
    return 0 if form is None or width % form.values else width // form.values * form.nbytes


def empty_tiles(count: int, nbytes: int) -> np.ndarray:
    """Return uninitialised tiles ``uint8[count, nbytes]``. Do not change them after `jax.device_put`.

    On CPU, `jax.device_put` uses them without a copy, because their start is aligned. Tiles of at least 2 MB start at a
    multiple of 2 MB, so that Linux can back them with huge pages, which are faster to read.
    """
    size = count * nbytes
    alignment = _HUGE_PAGE if size >= _HUGE_PAGE else _ALIGNMENT
    buffer = np.empty(size + alignment, np.uint8)
    start = -buffer.ctypes.data % alignment
    return buffer[start : start + size].reshape(count, nbytes)


def interleave(name: str, rows: np.ndarray, tiles: np.ndarray) -> None:
    """Fill ``tiles``, ``uint8[ceil(N / 16), 16 row_bytes]``, with the stored ``rows``, ``uint8[N, row_bytes]``.

    `tiles` must be C-contiguous.
    """
    form, (count, width) = FORMATS[name], rows.shape
    if count % LANES:
        rows = np.pad(rows, ((0, -count % LANES), (0, 0)))
    blocks = rows.reshape(len(tiles), LANES, width // form.nbytes, form.nbytes)
    assert tiles.flags.c_contiguous  # otherwise, the next line would copy
    out = tiles.reshape(len(tiles), blocks.shape[2], form.nbytes * LANES)
    at = 0
    for field in form.fields:
        part = blocks[..., field.offset : field.offset + field.nbytes]
        kind = np.dtype(f"u{field.unit}")
        target = out[..., at : at + LANES * field.nbytes].view(kind)
        target = target.reshape(len(tiles), blocks.shape[2], field.nbytes // field.unit, LANES)
        source = np.ascontiguousarray(part).view(kind)
        target[...] = np.moveaxis(source, 1, 3)
        at += LANES * field.nbytes


def check_finite(name: str, rows: np.ndarray, tensor: str) -> None:
    """Reject stored rows ``uint8[N, row_bytes]`` with a scale that is not finite. Weights of 16 bits are not checked.

    Raises:
        CheckpointError: a scale or minimum is infinite or NaN.
    """
    form = FORMATS[name]
    for field in form.fields:
        if field.name in ("d", "dmin", "m"):
            part = rows.reshape(-1, form.nbytes)[:, field.offset : field.offset + 2]
            if (np.ascontiguousarray(part).view("<u2") & _EXPONENT == _EXPONENT).any():
                raise CheckpointError(f"{tensor} has a scale that is not finite; use another file or create it again.")


def from_array(array: np.ndarray) -> StoredParts:
    """Return a bfloat16 or float16 matrix ``[out, in]`` in tiles."""
    name = "F16" if array.dtype == np.float16 else "BF16"
    rows = np.ascontiguousarray(array).view(np.uint8)
    tiles = empty_tiles(-(-len(rows) // LANES), LANES * rows.shape[1])
    interleave(name, rows, tiles)
    return (StoredMatrix(name, (array.shape[0], array.shape[1]), tiles),)
