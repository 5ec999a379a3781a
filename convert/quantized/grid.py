"""Matrices of int8 or float8 values in which each block of a regular grid has a scale."""

import dataclasses

import numpy as np

from convert.quantized.base import QuantizedRows, QuantizedTensor
from convert.safetensors_reader import Tensor


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks of a matrix that share a scale. The last ones may be cut off by the edge of the matrix.

    Attributes:
        height: the number of rows in a block; None for all rows.
        width: the number of columns in a block; None for all columns.
    """

    height: int | None
    width: int | None

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the number of blocks along each axis of a matrix ``[rows, columns]``."""
        return -(-rows // (self.height or rows)), -(-columns // (self.width or columns))

    def groups(self, columns: int) -> np.ndarray:
        """Return the index of each column's block."""
        return np.arange(columns) // (self.width or columns)

    def read(self, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        """Return the entries of `tensor`, which has one for each block, for the rows from `start` to `stop`."""
        if self.height is None:
            return tensor.read_part(...).reshape(1, -1)
        first = start // self.height
        entries = tensor.read(slice(first, -(-stop // self.height)))
        return entries[np.arange(start, stop) // self.height - first]


@dataclasses.dataclass(frozen=True)
class GridTensor(QuantizedTensor):
    """A matrix whose parts are "weight", `scale` and perhaps "weight_zero_point"."""

    scale: str
    grid: Grid

    def read_quantized(self, start: int, stop: int) -> QuantizedRows:
        values = self.parts["weight"].read(slice(start, stop))
        scales = self.grid.read(self.parts[self.scale], start, stop)
        point = self.parts.get("weight_zero_point")
        zeros = None if point is None else self.grid.read(point, start, stop)
        return QuantizedRows(values, scales, zeros, self.grid.groups(self.shape[1]))
