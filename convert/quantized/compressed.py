"""The compressed-tensors formats of llm-compressor: int4, int8 and float8 weights, packed into words or not.

"pack-quantized" stores ``weight_packed``, ``int32[O, ceil(I * bits / 32)]``, with an offset that makes the values
unsigned, and ``weight_shape``, ``[O, I]``. Its ``weight_zero_point`` is packed along axis 0 instead. The other formats
store ``weight`` and ``weight_zero_point`` as int8 or float8. ``weight_scale`` has one entry for each block.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

import numpy as np

from convert.errors import CheckpointError
from convert.json_fields import Fields
from convert.quantized import fields
from convert.quantized.base import FLOAT8, FLOATS, INT8, INT32, INT64, Format, Part, QuantizedRows, QuantizedTensor
from convert.quantized.compressed_config import Scheme, parse_scheme, quantized_activations
from convert.quantized.grid import Grid, GridTensor
from convert.quantized.int32 import unpack, unpacked_rows
from convert.safetensors_reader import Tensor

_PLACES = {
    "input_activations": frozenset({"input_scale", "input_zero_point"}),
    "output_activations": frozenset({"output_scale", "output_zero_point"}),
    "kv_cache_scheme": frozenset({"k_scale", "v_scale", "k_zero_point", "v_zero_point", "output_scale"}),
}


@dataclasses.dataclass(frozen=True)
class PackedTensor(QuantizedTensor):
    """A matrix whose values are packed into words."""

    bits: int
    grid: Grid

    def read_quantized(self, start: int, stop: int) -> QuantizedRows:
        values = unpack(self.parts["weight_packed"].read(slice(start, stop)), self.bits)[:, : self.shape[1]]
        scales = self.grid.read(self.parts["weight_scale"], start, stop)
        point = self.parts.get("weight_zero_point")
        if point is None:
            zeros = np.full((1, scales.shape[1]), 1 << (self.bits - 1))
        else:
            zeros = unpacked_rows(point, start, stop, self.bits)
        return QuantizedRows(values, scales, zeros, self.grid.groups(self.shape[1], self.parts.get("weight_g_idx")))


@dataclasses.dataclass(frozen=True)
class Compressed(Format):
    """compressed-tensors with one scheme for all quantised matrices."""

    SUFFIXES: ClassVar = frozenset(
        {"weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
    )
    scheme: Scheme = dataclasses.field(kw_only=True)

    @classmethod
    def parse(cls, raw: Fields) -> Self:
        """Return the format that a section of config.json describes.

        Raises:
            CheckpointError: a field is invalid, or describes a format that is not supported.
        """
        scheme, activations = parse_scheme(raw), quantized_activations(raw)
        note = f"ignoring {', '.join(activations)}, because activations and the KV cache are not quantised"
        return cls(
            f"{scheme.format} compressed-tensors",
            fields.names(raw, "ignore"),
            frozenset[str]().union(*(_PLACES[key] for key in activations)),
            (note,) if activations else (),
            scheme=scheme,
        )

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        scheme, grid = self.scheme, self.scheme.grid
        if not scheme.is_float and grid.width is not None:
            fields.check_multiple(columns, grid.width, "columns cannot be divided into groups")
        shape = grid.shape(rows, columns)
        parts = {"weight_scale": Part(FLOATS, ((), (1,), shape) if grid.height is None else (shape,))}
        if scheme.reorders:
            parts["weight_g_idx"] = Part((INT32,), ((columns,),))
        if scheme.format == "pack-quantized":
            return parts | self._packed_parts(rows, columns, shape[1])
        if not scheme.is_float:
            parts["weight_zero_point"] = Part((INT8,), parts["weight_scale"].shapes, not scheme.is_symmetric)
        return parts | {"weight": Part((FLOAT8,) if scheme.is_float else (INT8,), ((rows, columns),))}

    def _packed_parts(self, rows: int, columns: int, groups: int) -> dict[str, Part]:
        across, down = (-(-count * self.scheme.bits // 32) for count in (columns, rows))
        parts = {
            "weight_packed": Part((INT32,), ((rows, across),)),
            "weight_shape": Part((INT64, INT32), ((2,),)),
        }
        return parts if self.scheme.is_symmetric else parts | {"weight_zero_point": Part((INT32,), ((down, groups),))}

    def tensor(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> QuantizedTensor:
        if "weight_packed" not in parts:
            place = name, parts["weight"].file, np.dtype(np.float32), shape, self.label, parts
            return GridTensor(*place, "weight_scale", self.scheme.grid)
        stored = tuple(parts["weight_shape"].read_part(...).tolist())
        if stored != shape:
            raise CheckpointError(
                f"{parts['weight_shape'].name} is {list(stored)}, expected {list(shape)} according to "
                "config.json; restore the model's own files."
            )
        place = name, parts["weight_packed"].file, np.dtype(np.float32), shape, self.label, parts
        return PackedTensor(*place, self.scheme.bits, self.scheme.grid)
