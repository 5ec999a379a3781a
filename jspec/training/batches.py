"""Fixed-shape batches of rows, in an order that depends only on the seed and the step number."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import cast

import numpy as np

from jspec.training.dataset import Row

_TILE = 64


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch of padded rows.

    Attributes:
        numbers: ``int[B]``, the row numbers; -1 for a padding row.
        tokens: ``int32[B, S]``.
        learned: ``bool[B, S]``.
    """

    numbers: np.ndarray
    tokens: np.ndarray
    learned: np.ndarray


class Plan:
    """The division of rows into batches. Rows of similar length share a batch.

    Args:
        rows: all rows.
        step_tokens: the maximum number of tokens in a batch, including padding. A single row may have more.
        seed: the seed for the order, which differs in every epoch.
        devices: padding rows fill each batch to a multiple of this number. Padding rows do not affect training.
    """

    def __init__(self, rows: Sequence[Row], step_tokens: int, seed: int, devices: int = 1):
        self.rows, self._seed, self._devices = rows, seed, devices
        self._order: tuple[int, list[tuple[np.ndarray, int]]] = -1, []  # the last requested epoch and its order
        self._widths = np.array([-(-len(row.tokens) // _TILE) * _TILE for row in rows])
        self._sizes = {int(width): max(1, step_tokens // int(width)) for width in np.unique(self._widths)}

    @property
    def steps(self) -> int:
        """The number of batches in an epoch."""
        return sum(-(-int((self._widths == width).sum()) // size) for width, size in self._sizes.items())

    def batch(self, step: int) -> Batch:
        """Return the batch of a step; steps count from 0."""
        epoch, number = divmod(step, self.steps)
        if self._order[0] != epoch:
            self._order = epoch, self._epoch(epoch)
        return self.of_rows(*self._order[1][number])

    def in_order(self, known: Collection[int] = ()) -> Iterator[Batch]:
        """Yield batches of all rows except those in `known`, once each, starting with the shortest."""
        for width, size in self._sizes.items():
            rows = np.array([i for i in np.flatnonzero(self._widths == width) if int(i) not in known], int)
            for start in range(0, len(rows), size):
                yield self.of_rows(rows[start : start + size], width)

    def _epoch(self, epoch: int) -> list[tuple[np.ndarray, int]]:
        rng = np.random.default_rng((self._seed, epoch))
        found: list[tuple[np.ndarray, int]] = []
        for width, size in self._sizes.items():
            order = rng.permutation(np.flatnonzero(self._widths == width))
            found += [(order[start : start + size], width) for start in range(0, len(order), size)]
        return [found[i] for i in rng.permutation(len(found))]

    def of_rows(self, numbers: np.ndarray, width: int) -> Batch:
        """Return a batch of the rows `numbers`, filled with padding rows up to the batch size for their width."""
        size = -(-self._sizes[width] // self._devices) * self._devices
        return side_by_side([self.rows[cast(int, number)] for number in numbers], size, width, numbers)


def side_by_side(rows: Sequence[Row], size: int, width: int, numbers: np.ndarray | None = None) -> Batch:
    """Return `rows` as a batch of `size` rows of `width` tokens, numbered from 0 unless `numbers` is given."""
    tokens, learned = np.zeros((size, width), np.int32), np.zeros((size, width), bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)], learned[place, : len(row.tokens)] = row.tokens, row.learned
    numbers = np.arange(len(rows)) if numbers is None else numbers
    return Batch(np.pad(numbers, (0, size - len(rows)), constant_values=-1), tokens, learned)
