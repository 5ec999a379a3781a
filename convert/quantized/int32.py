"""Unpack small integers from int32 words, which store the first integer in the lowest bits."""

import numpy as np

from convert.safetensors_reader import Tensor


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Return the values ``uint8[N, M * 32 / bits]`` in the words ``int32[N, M]``, for 4 and 8 bits."""
    stored = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    return stored if bits == 8 else np.stack((stored & 15, stored >> 4), axis=-1).reshape(len(words), -1)


def unpacked_columns(tensor: Tensor, start: int, stop: int, bits: int, added: int = 0) -> tuple[np.ndarray, int]:
    """Return the values of all words that hold the columns from `start` to `stop`, for each row.

    Args:
        added: the number that is added to each word, modulo 2**32, before it is unpacked.

    Returns:
        The values, and the index of the column `start` among them.
    """
    first, last = _words(start, stop, bits)
    words = tensor.read_part((slice(None), slice(first, last))) + np.int32(added)
    return unpack(words, bits), start - first * 32 // bits


def unpacked_rows(tensor: Tensor, start: int, stop: int, bits: int) -> np.ndarray:
    """Return the rows from `start` to `stop` of a matrix whose values are packed along axis 0."""
    first, last = _words(start, stop, bits)
    skipped = start - first * 32 // bits
    return unpack(tensor.read(slice(first, last)).T, bits).T[skipped : skipped + stop - start]


def _words(start: int, stop: int, bits: int) -> tuple[int, int]:
    return start * bits // 32, -(-stop * bits // 32)
