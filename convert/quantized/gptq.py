"""GPTQ in the layouts "gptq" and "gptq_v2" of AutoGPTQ and GPTQModel, with 4 or 8 bits.

``qweight`` is ``int32[I * bits / 32, O]``: each word holds consecutive inputs. ``qzeros`` is
``int32[G, O * bits / 32]``: each word holds consecutive outputs. "gptq" stores zero points minus 1. The 1s are
subtracted from whole words, so a zero point of 0 borrows from the next one. ``scales`` is ``float16[G, O]``, and
``g_idx``, ``int32[I]``, is the group of each input.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self, cast

import numpy as np

from convert.errors import CheckpointError
from convert.json_fields import Fields, flag
from convert.quantized import fields
from convert.quantized.base import FLOATS, INT32, Format, Part, QuantizedRows, QuantizedTensor
from convert.quantized.int32 import unpack, unpacked_columns
from convert.safetensors_reader import Tensor

# bits -> a word that holds a 1 at every place.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclasses.dataclass(frozen=True)
class GptqTensor(QuantizedTensor):
    """A GPTQ matrix.

    Attributes:
        bits: the number of bits of a value.
        added: the number that is added to each word of `qzeros`.
        reorders: whether `g_idx` may be out of order.
    """

    bits: int
    added: int
    reorders: bool

    def read_quantized(self, start: int, stop: int) -> QuantizedRows:
        outputs = slice(None), slice(start, stop)
        values = unpack(self.parts["qweight"].read_part(outputs).T, self.bits)
        zeros, skipped = unpacked_columns(self.parts["qzeros"], start, stop, self.bits, self.added)
        zeros = zeros[:, skipped : skipped + stop - start].T
        scales = self.parts["scales"].read_part(outputs).T
        return QuantizedRows(values, scales, zeros, self._groups(scales.shape[1]))

    def _groups(self, count: int) -> np.ndarray:
        """Return the group of each input, out of `count` groups."""
        in_order = np.arange(self.shape[1]) // (self.shape[1] // count)
        if "g_idx" not in self.parts:
            return in_order
        groups = self.parts["g_idx"].read_part(...)
        if groups.min() < 0 or groups.max() >= count:
            raise self._wrong(f"names groups outside 0 to {count - 1}")
        if not self.reorders and not np.array_equal(groups, in_order):
            raise self._wrong("reorders the groups, but desc_act is false")
        return groups

    def _wrong(self, what: str) -> CheckpointError:
        tensor = self.parts["g_idx"]
        return CheckpointError(f"{tensor.name} in {tensor.file} {what}; restore the model's own files.")


@dataclasses.dataclass(frozen=True)
class Gptq(Format):
    """GPTQ with groups of `group_size` columns; None means one group. See `GptqTensor` for the other attributes."""

    SUFFIXES: ClassVar = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    group_size: int | None = None
    bits: int = 4
    added: int = 0
    reorders: bool = False

    @classmethod
    def parse(cls, raw: Fields) -> Self:
        """Return the format that a section of config.json describes.

        Raises:
            CheckpointError: a field is invalid, or describes an unsupported layout or number of bits.
        """
        bits = cast("int", fields.one_of(raw, "bits", (4, 8)))
        key = "checkpoint_format" if raw.get("checkpoint_format") is not None else "format"
        layout = fields.one_of(raw, key, ("gptq", "gptq_v2"), "gptq")
        fields.absent(raw, "dynamic", "is_marlin_format")
        flag(raw, "sym", True)
        return cls(
            f"{bits}-bit GPTQ",
            group_size=fields.group_size(raw, 128),
            bits=bits,
            added=_ONES[bits] if layout == "gptq" else 0,
            reorders=flag(raw, "desc_act"),
        )

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        size, packed = columns if self.group_size is None else self.group_size, 32 // self.bits
        fields.check_multiple(columns, size, "columns cannot be divided into groups")
        fields.check_multiple(columns, packed, "columns cannot be divided into words")
        fields.check_multiple(rows, packed, "rows cannot be divided into words")
        return {
            "qweight": Part((INT32,), ((columns // packed, rows),)),
            "qzeros": Part((INT32,), ((columns // size, rows // packed),)),
            "scales": Part(FLOATS, ((columns // size, rows),)),
            "g_idx": Part((INT32,), ((columns,),), self.reorders),
        }

    def tensor(self, name: str, shape: tuple[int, ...], parts: Mapping[str, Tensor]) -> GptqTensor:
        file, dtype = parts["qweight"].file, np.dtype(np.float32)
        return GptqTensor(name, file, dtype, shape, self.label, parts, self.bits, self.added, self.reorders)
