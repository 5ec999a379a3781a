"""Matrices of int8 or float8 values in which each block of a regular grid has a scale."""

import dataclasses

import numpy as np

from convert.errors import CheckpointError
from convert.quantized.base import QuantizedRows, QuantizedTensor
from convert.safetensors_reader import Tensor


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks of a matrix that share a scale. The last blocks may be cut off by the edge of the matrix.

    Attributes:
        height: the number of rows in a block; None for all rows.
        width: the number of columns in a block; None for all columns.
    """

    height: int | None
    width: int | None

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the number of blocks along each axis of a matrix ``[rows, columns]``."""
        return -(-rows // (self.height or rows)), -(-columns // (self.width or columns))

    def groups(self, columns: int, index: Tensor | None = None) -> np.ndarray:
        """Return the index of each column's block.

        Args:
            index: the tensor ``weight_g_idx``, which holds these indices if the columns are out of order.

        Raises:
            CheckpointError: `index` does not assign the same number of columns to each block.
        """
        in_order = np.arange(columns) // min(self.width or columns, columns)
        if index is None:
            return in_order
        groups = index.read_part(...)
        if (groups == -1).all():  # the index was never set
            return in_order
        if not np.array_equal(np.sort(groups), in_order):
            raise CheckpointError(
                f"{index.name} in {index.file} does not assign equally many columns to each of {in_order[-1] + 1} "
                "groups; download the file again."
            )
        return groups

    def read(self, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        """Return the entries of `tensor`, one per block, for the rows from `start` to `stop`."""
        if self.height is None:
            return tensor.read_part(...).reshape(1, -1)
        first = start // self.height
        entries = tensor.read(slice(first, -(-stop // self.height)))
        return entries[np.arange(start, stop) // min(self.height, stop) - first].reshape(stop - start, -1)


@dataclasses.dataclass(frozen=True)
class GridTensor(QuantizedTensor):
    """A matrix with the parts "weight" and `scale`, and optionally "weight_zero_point" and "weight_g_idx"."""

    scale: str
    grid: Grid

    def read_quantized(self, start: int, stop: int) -> QuantizedRows:
        values = self.parts["weight"].read(slice(start, stop))
        scales = self.grid.read(self.parts[self.scale], start, stop)
        point = self.parts.get("weight_zero_point")
        zeros = None if point is None else self.grid.read(point, start, stop)
        return QuantizedRows(values, scales, zeros, self.grid.groups(self.shape[1], self.parts.get("weight_g_idx")))
