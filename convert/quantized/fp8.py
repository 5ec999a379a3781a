"""FP8: float8_e4m3fn weights in the layouts of transformers and vLLM.

transformers stores ``weight_scale_inv``, for each block or for the whole matrix. Despite its name, it multiplies the
stored weights. AutoFP8 and vLLM store ``weight_scale``, for the whole matrix or for each row. Scales of activations and
of the KV cache are not read.
"""

import dataclasses
import math
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

_SCALE, _SERVING_SCALE = "weight_scale_inv", "weight_scale"
_CACHE = frozenset({"kv_scale", "k_scale", "v_scale"})


@dataclasses.dataclass(frozen=True)
class Fp8(Format):
    """FP8.

    Attributes:
        grid: the blocks that share a ``weight_scale_inv``.
        names_blocks: whether config.json has their size, so that each matrix must have a ``weight_scale_inv``.
    """

    SUFFIXES: ClassVar = frozenset({"weight", _SCALE, _SERVING_SCALE})
    grid: Grid = dataclasses.field(kw_only=True)
    names_blocks: bool = dataclasses.field(kw_only=True)

    @classmethod
    def parse(cls, raw: Fields) -> Self:
        """Return the format that a section of config.json describes.

        Raises:
            CheckpointError: a field is invalid, or describes another kind of FP8.
        """
        fields.one_of(raw, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        scheme = fields.one_of(raw, "activation_scheme", ("dynamic", "static"), "dynamic")
        note = f"ignoring activation_scheme {scheme!r}, because activations and the KV cache are not quantised"
        ignored = fields.names(raw, "modules_to_not_convert") | fields.names(raw, "ignored_layers")
        unread = _CACHE | frozenset({"activation_scale", "input_scale"} if scheme == "static" else ())
        grid = block_grid(raw, "weight_block_size", [128, 128])
        names_blocks = raw.get("weight_block_size") is not None
        return cls("FP8", ignored, unread, (note,), grid=grid, names_blocks=names_blocks)

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        shape = self.grid.shape(rows, columns)
        shapes = ((), (1,), shape) if self.grid.height is None else (shape,)
        parts = {"weight": Part((FLOAT8,), ((rows, columns),)), _SCALE: Part(FLOATS, shapes, self.names_blocks)}
        if self.names_blocks:
            return parts
        return parts | {_SERVING_SCALE: Part(FLOATS, ((), (1,), (1, 1), (rows,), (rows, 1)), required=False)}

    def tensor(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> GridTensor:
        file, dtype = parts["weight"].file, np.dtype(np.float32)
        scales = sorted(parts.keys() - {"weight"})
        if len(scales) != 1:
            raise CheckpointError(
                f"{name} in {file} has {' and '.join(scales) or 'no scale'}; expected either {_SERVING_SCALE} or "
                f"{_SCALE}, so download the checkpoint again."
            )
        grid = self.grid
        if scales == [_SERVING_SCALE]:
            grid = Grid(None if math.prod(parts[_SERVING_SCALE].shape) == 1 else 1, None)
        return GridTensor(name, file, dtype, shape, self.label, parts, scales[0], grid)


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
