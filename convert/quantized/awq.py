"""AWQ in AutoAWQ's layout "gemm": 4-bit values, with a scale and a zero point for each group of columns.

``qweight`` is ``int32[I, O / 8]`` and ``qzeros`` ``int32[G, O / 8]``. Each word holds eight consecutive outputs,
interleaved. ``scales`` is ``float16[G, O]``.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from convert.json_fields import Fields, flag
from convert.quantized import fields
from convert.quantized.base import FLOATS, INT32, Format, Part, QuantizedRows, QuantizedTensor
from convert.quantized.int32 import unpacked_columns
from convert.safetensors_reader import Tensor

_BITS, _PACKED = 4, 8
# A word holds the outputs 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first. These are the places of the outputs 0 to 7.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


@dataclasses.dataclass(frozen=True)
class AwqTensor(QuantizedTensor):
    def read_quantized(self, start: int, stop: int) -> QuantizedRows:
        scales = self.parts["scales"].read_part((slice(None), slice(start, stop))).T
        values, zeros = (_outputs(self.parts[part], start, stop) for part in ("qweight", "qzeros"))
        columns = np.arange(self.shape[1])
        return QuantizedRows(values, scales, zeros, columns // (self.shape[1] // scales.shape[1]))


def _outputs(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Return the values of the outputs from `start` to `stop`, ``[stop - start, ...]``."""
    values, skipped = unpacked_columns(tensor, start, stop, _BITS)
    ordered = values.reshape(len(values), -1, _PACKED)[:, :, _PLACES].reshape(len(values), -1)
    return ordered[:, skipped : skipped + stop - start].T


@dataclasses.dataclass(frozen=True)
class Awq(Format):
    """AWQ with groups of `group_size` columns; None means one group."""

    SUFFIXES: ClassVar = frozenset({"qweight", "qzeros", "scales"})
    group_size: int | None = None

    @classmethod
    def parse(cls, raw: Fields) -> Self:
        """Return the format that a section of config.json describes.

        Raises:
            CheckpointError: a field is invalid, or describes an unsupported layout or number of bits.
        """
        fields.one_of(raw, "bits", (_BITS,), _BITS)
        fields.one_of(raw, "version" if raw.get("version") is not None else "format", ("gemm",), "gemm")
        flag(raw, "zero_point", True)
        ignored = fields.names(raw, "modules_to_not_convert")
        return cls("4-bit AWQ", ignored, group_size=fields.group_size(raw, 128))

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        size = columns if self.group_size is None else self.group_size
        fields.check_multiple(columns, size, "columns cannot be divided into groups")
        fields.check_multiple(rows, _PACKED, "rows cannot be divided into words")
        return {
            "qweight": Part((INT32,), ((columns, rows // _PACKED),)),
            "qzeros": Part((INT32,), ((columns // size, rows // _PACKED),)),
            "scales": Part(FLOATS, ((columns // size, rows),)),
        }

    def tensor(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> AwqTensor:
        return AwqTensor(name, parts["qweight"].file, np.dtype(np.float32), shape, self.label, parts)
