"""The fine-grained FP8 of transformers: float8_e4m3fn weights with a scale for each block or for the whole matrix.

Despite its name, ``weight_scale_inv`` multiplies the stored weights.
"""

import dataclasses
import reprlib
from collections.abc import Mapping
from typing import ClassVar, Self, cast

import numpy as np

from convert.errors import CheckpointError
from convert.json_fields import Fields
from convert.quantized import fields
from convert.quantized.base import FLOAT8, FLOATS, Format, Part
from convert.quantized.grid import Grid, GridTensor
from convert.safetensors_reader import Tensor

_SCALE = "weight_scale_inv"


@dataclasses.dataclass(frozen=True)
class Fp8(Format):
    """FP8 with a scale for each block of `grid`."""

    SUFFIXES: ClassVar = frozenset({"weight", _SCALE})
    grid: Grid = dataclasses.field(kw_only=True)

    @classmethod
    def parse(cls, raw: Fields) -> Self:
        """Return the format that a section of config.json describes.

        Raises:
            CheckpointError: a field is invalid, or describes another kind of FP8.
        """
        fields.one_of(raw, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        scheme = fields.one_of(raw, "activation_scheme", ("dynamic", "static"), "dynamic")
        note = f"ignoring activation_scheme {scheme!r}, because activations are not quantised"
        ignored = fields.names(raw, "modules_to_not_convert") | fields.names(raw, "ignored_layers")
        unread = frozenset({"activation_scale", "input_scale"} if scheme == "static" else ())
        return cls("FP8", ignored, unread, (note,), grid=block_grid(raw, "weight_block_size", [128, 128]))

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        shape = self.grid.shape(rows, columns)
        shapes = ((), (1,), shape) if self.grid.height is None else (shape,)
        return {"weight": Part((FLOAT8,), ((rows, columns),)), _SCALE: Part(FLOATS, shapes)}

    def tensor(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> GridTensor:
        file, dtype = parts["weight"].file, np.dtype(np.float32)
        return GridTensor(name, file, dtype, shape, self.label, parts, _SCALE, self.grid)


def block_grid(raw: Fields, key: str, default: list[int] | None = None) -> Grid:
    """Return the grid of a field such as [128, 128]. If the field is null, the whole matrix is one block.

    Raises:
        CheckpointError: the field is neither null nor two positive integers.
    """
    value = raw.get(key, default)
    if value is None:
        return Grid(None, None)
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
        raise CheckpointError(
            f"{key} is {reprlib.repr(value)}; expected two positive integers, as in the model's own config.json."
        )
    height, width = cast("list[int]", sizes)
    return Grid(height, width)
