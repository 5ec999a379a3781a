"""Arrays of a checkpoint that are read on demand, so that a process reads only the parts that its devices hold."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from convert import dtypes, keymap
from convert.safetensors_reader import Float8Tensor, Tensor, row_chunks


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array whose values have not been read from its files yet.

    Attributes:
        entry: the array's name and shape, and the names of the tensors that are concatenated along axis 0.
        tensors: the tensors, in the same order.
        dtype: the dtype to which the values are cast.
        order: for each row of the array, its index in the concatenated tensors; None if the orders are the same.
    """

    entry: keymap.Entry
    tensors: tuple[Tensor, ...]
    dtype: np.dtype
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.entry.shape

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the values at `index`, which has one slice for each axis. Read the files in chunks of 16 MiB.

        Raises:
            CheckpointError: a file has become unreadable since it was scanned, or a value does not fit the dtype.
        """
        (first, last, _), *columns = (part.indices(size) for part, size in zip(index, self.shape, strict=True))
        selected = tuple(slice(start, stop) for start, stop, _ in columns)
        out = np.empty((last - first, *(part.stop - part.start for part in selected)), self.dtype)
        if self.order is None:
            self._read_rows(first, last, selected, out)
            return out
        rows = self.order[first:last]
        edges = [0, *(1 + np.flatnonzero(np.diff(rows) != 1)), len(rows)]  # of runs of consecutive rows
        for start, stop in itertools.pairwise(edges):
            if start < stop:
                self._read_rows(int(rows[start]), int(rows[stop - 1]) + 1, selected, out[start:stop])
        return out

    def _read_rows(self, first: int, last: int, selected: tuple[slice, ...], out: np.ndarray) -> None:
        """Read consecutive rows of the concatenated tensors."""
        offset = 0  # the tensor's first row in the whole array
        for tensor in self.tensors:
            count = tensor.shape[0]
            begin, end = max(first - offset, 0), min(last - offset, count)
            for rows in row_chunks((max(end - begin, 0), *tensor.shape[1:]), tensor.dtype.itemsize):
                source_rows = slice(begin + rows.start, begin + rows.stop)
                start = offset - first
                self._copy(tensor, source_rows, selected, out[start + source_rows.start : start + source_rows.stop])
            offset += count

    @staticmethod
    def _copy(tensor: Tensor, rows: slice, columns: tuple[slice, ...], out: np.ndarray) -> None:
        with np.errstate(over="ignore"):  # check_cast reports overflow more clearly than a warning does
            if type(tensor) in (Tensor, Float8Tensor):  # others can only read whole rows
                out[...] = tensor.read_part((rows, *columns) if columns else rows)
            else:
                out[...] = tensor.read(rows)[(slice(None), *columns)]
        dtypes.check_cast(out, tensor.dtype, tensor.name)


def stored_arrays(
    tensors: Mapping[str, Tensor], entries: Iterable[keymap.Entry], dtype: np.dtype
) -> Iterator[tuple[str, StoredArray]]:
    """Yield (our name, array) pairs, as `convert.from_hf.filled` does, but without reading any values."""
    for entry in entries:
        yield entry.name, StoredArray(entry, tuple(tensors[part.hf_name] for part in entry.parts), dtype)
