"""Batches of token-id rows with few shapes, so that few programs are compiled."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jspec.text.chat_template import Batch, encode


class RowBatch(NamedTuple):
    """Some of the rows, padded on the right.

    Attributes:
        tokens: ``int32[B, P]``. P is a power of two.
        lengths: ``int32[B]``.
        indices: the index of each row. The last batch repeats its last row, so that it also has B rows.
        num_rows: the number of rows that are not repetitions.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    indices: list[int]
    num_rows: int

    @property
    def prompts(self) -> Batch:
        """The rows as a batch of prompts."""
        return Batch(self.tokens, self.lengths)


def row_batches(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[RowBatch]:
    """Yield all rows in batches of `batch_size`, the longest first. If there are fewer rows, they are one batch."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    size = max(1, min(batch_size, len(rows)))
    for start in range(0, len(rows), size):
        own = order[start : start + size]
        indices = own + own[-1:] * (size - len(own))
        batch = encode(None, [rows[i] for i in indices])
        yield RowBatch(batch.tokens, batch.lengths, indices, len(own))
