"""Arrays of a checkpoint that are read on demand, so that a process reads only the parts that its devices hold."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from convert import dtypes, keymap
from convert.safetensors_reader import Tensor, row_chunks


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array whose values have not been read from its files yet.

    Attributes:
        entry: its name and shape, and the tensors that are concatenated on axis 0.
        tensors: these tensors.
        dtype: the dtype to which the values are cast.
    """

    entry: keymap.Entry
    tensors: tuple[Tensor, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.entry.shape

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Return the values at `index`, which has one slice for each axis. Read 16 MiB of the files at a time.

        Raises:
            CheckpointError: a file has become unreadable since it was scanned, or a value does not fit the dtype.
        """
        (first, last, _), *columns = (part.indices(size) for part, size in zip(index, self.shape, strict=True))
        selected = tuple(slice(start, stop) for start, stop, _ in columns)
        out = np.empty((last - first, *(part.stop - part.start for part in selected)), self.dtype)
        offset = 0  # of the tensor in the whole array
        for tensor in self.tensors:
            count = tensor.shape[0]
            begin, end = max(first - offset, 0), min(last - offset, count)
            for rows in row_chunks((max(end - begin, 0), *tensor.shape[1:]), tensor.dtype.itemsize):
                at = slice(begin + rows.start, begin + rows.stop)
                start = offset - first
                self._copy(tensor, at, selected, out[start + at.start : start + at.stop])
            offset += count
        return out

    @staticmethod
    def _copy(tensor: Tensor, rows: slice, columns: tuple[slice, ...], out: np.ndarray) -> None:
        with np.errstate(over="ignore"):  # check_cast reports overflow more clearly than a warning does
            out[...] = tensor.read(rows)[(slice(None), *columns)]
        dtypes.check_cast(out, tensor.dtype, tensor.name)


def stored_arrays(
    found: Mapping[str, Tensor], entries: Iterable[keymap.Entry], dtype: np.dtype
) -> Iterator[tuple[str, StoredArray]]:
    """Yield (our name, array) pairs, as `convert.from_hf.filled` does, but without reading any values."""
    for entry in entries:
        yield entry.name, StoredArray(entry, tuple(found[part.hf_name] for part in entry.parts), dtype)
