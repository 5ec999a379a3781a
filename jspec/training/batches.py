"""Rows as batches of one shape, in an order that the seed and the number of the step decide alone."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from jspec.training.dataset import Row

_TILE = 64


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows side by side, padded.

    Attributes:
        numbers: ``int[B]``, which rows; -1 for one of padding.
        tokens: ``int32[B, S]``.
        learned: ``bool[B, S]``.
    """

    numbers: np.ndarray
    tokens: np.ndarray
    learned: np.ndarray


class Plan:
    """Which rows make which batch: rows of like length together.

    Args:
        rows: all there are.
        step_tokens: of a batch at most, padding included, but for one row.
        seed: of the order, which is another one in every epoch.
        devices: a batch is filled with rows of padding up to a multiple of this; what it teaches is the same.
    """

    def __init__(self, rows: Sequence[Row], step_tokens: int, seed: int, devices: int = 1):
        self.rows, self._seed, self._devices = rows, seed, devices
        self._order: tuple[int, list[tuple[np.ndarray, int]]] = -1, []  # of the epoch that was asked for last
        self._widths = np.array([-(-len(row.tokens) // _TILE) * _TILE for row in rows])
        self._sizes = {int(width): max(1, step_tokens // int(width)) for width in np.unique(self._widths)}

    @property
    def steps(self) -> int:
        """How many batches an epoch has."""
        return sum(-(-int((self._widths == width).sum()) // size) for width, size in self._sizes.items())

    def batch(self, step: int) -> Batch:
        """The batch of a step, from 0 on."""
        epoch, number = divmod(step, self.steps)
        if self._order[0] != epoch:
            self._order = epoch, self._epoch(epoch)
        return self.of_rows(*self._order[1][number])

    def in_order(self, known: Collection[int] = ()) -> Iterator[Batch]:
        """All rows but those `known`, once, the shortest first."""
        for width, size in self._sizes.items():
            rows = np.array([i for i in np.flatnonzero(self._widths == width) if int(i) not in known], int)
            for start in range(0, len(rows), size):
                yield self.of_rows(rows[start : start + size], width)

    def _epoch(self, epoch: int) -> list[tuple[np.ndarray, int]]:
        rng = np.random.default_rng((self._seed, epoch))
        found = []
        for width, size in self._sizes.items():
            order = rng.permutation(np.flatnonzero(self._widths == width))
            found += [(order[start : start + size], width) for start in range(0, len(order), size)]
        return [found[i] for i in rng.permutation(len(found))]

    def of_rows(self, numbers: np.ndarray, width: int) -> Batch:
        """Those rows, and rows of padding up to the size of their kind."""
        size = -(-self._sizes[width] // self._devices) * self._devices
        return side_by_side([self.rows[number] for number in numbers], size, width, numbers)


def side_by_side(rows: Sequence[Row], size: int, width: int, numbers: np.ndarray | None = None) -> Batch:
    """`rows` as a batch of `size` rows of `width` tokens; they are numbered from 0 on unless they have `numbers`."""
    tokens, learned = np.zeros((size, width), np.int32), np.zeros((size, width), bool)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)], learned[place, : len(row.tokens)] = row.tokens, row.learned
    numbers = np.arange(len(rows)) if numbers is None else numbers
    return Batch(np.pad(numbers, (0, size - len(rows)), constant_values=-1), tokens, learned)
