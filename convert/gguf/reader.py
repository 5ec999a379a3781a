"""Read GGUF files as Hugging Face tensors, dequantised row by row.

`convert.from_hf` checks the tensors and joins them.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import numpy as np

from convert import dtypes, from_hf, keymap
from convert.config import LlamaConfig
from convert.errors import CheckpointError, listing
from convert.gguf.config import ROPE_FACTORS, Architecture, architecture
from convert.gguf.header import Header, Stored
from convert.safetensors_reader import Tensor

# Old converters stored the rotary frequencies. They are recomputed from the metadata instead.
_TABLE = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?")


@dataclasses.dataclass(frozen=True)
class GgufTensor(Tensor):
    """A tensor in a GGUF file. Its `dtype` is float32 if it is quantised.

    Attributes:
        interleaved: the number of heads whose first-half and second-half rows alternate; 0 if the rows are in order.
    """

    stored: Stored
    interleaved: int

    def read(self, rows: slice) -> np.ndarray:
        if len(self.shape) == 1:
            return self._values(0, 1).reshape(-1)[self._order(rows)]
        return self._in_order(rows, self._values)

    @property
    def format(self) -> str:
        return self.stored.kind.name

    def read_stored(self, rows: slice) -> np.ndarray:
        return self._in_order(rows, self._bytes)

    def _in_order(self, rows: slice, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Return `rows` of the Hugging Face tensor, given a function that reads consecutive rows of the file."""
        order = self._order(rows)
        first = int(order.min())
        found = read(first, int(order.max()) + 1)
        return found[order - first] if self.interleaved else found

    def _order(self, rows: slice) -> np.ndarray:
        """Return the indices of the file's rows that hold `rows` of the Hugging Face tensor."""
        order = np.arange(self.shape[0])
        if self.interleaved:
            order = order.reshape(self.interleaved, -1, 2).swapaxes(1, 2).reshape(-1)
        return order[rows]

    def _values(self, first: int, last: int) -> np.ndarray:
        """Return the file's rows from `first` up to, but not including, `last`. A vector counts as one row."""
        import gguf

        data = self._bytes(first, last)
        if self.stored.kind.name in dtypes.BY_SAFETENSORS_CODE:
            return data.view(self.dtype)
        with np.errstate(all="ignore"):  # a scale may have any value
            return gguf.dequantize(data, self.stored.kind)

    def _bytes(self, first: int, last: int) -> np.ndarray:
        """Return the same rows as `_values`, but as the file's raw bytes, ``uint8[last - first, row_bytes]``."""
        count = self.shape[0] if len(self.shape) > 1 else 1
        width = self.stored.nbytes // count
        try:
            data = np.fromfile(self.file, np.uint8, (last - first) * width, offset=self.stored.offset + first * width)
        except OSError as error:
            raise CheckpointError(
                f"{self.file} cannot be read ({error}); check its permissions and the disk."
            ) from error
        if data.size != (last - first) * width:
            raise CheckpointError(f"{self.file} was cut short while it was read; read it again.")
        return data.reshape(last - first, width)


def tensors(header: Header, config: LlamaConfig) -> dict[str, Tensor]:
    """Return the tensors, keyed by Hugging Face name, after the same checks as for a Hugging Face directory.

    Raises:
        CheckpointError: a tensor is missing, unknown or misshapen, or has a type that the gguf library cannot
            dequantise.
    """
    from_hf.check_depth(config, len(header.tensors), header.file)
    kind, expected = architecture(header), keymap.hf_shapes(config)
    found = {
        ours: GgufTensor(name, header.file, _dtype(name, stored, header.file), stored.shape, stored, 0)
        for ours, (name, stored) in _named(header, config, expected).items()
    }
    from_hf.check_names(found, expected, header.file)
    return {name: _in_order(name, tensor, kind, config) for name, tensor in found.items()}


def _named(header: Header, config: LlamaConfig, expected: Iterable[str]) -> dict[str, tuple[str, Stored]]:
    """Return each tensor in the file with its name there, keyed by its Hugging Face name."""
    import gguf

    left = {name: tensor for name, tensor in header.tensors.items() if not _TABLE.fullmatch(name)}
    factors = left.pop(ROPE_FACTORS, None)  # the config already contains them
    if factors and factors.shape != (config.head_dim // 2,):
        raise CheckpointError(
            f"{ROPE_FACTORS} in {header.file} has shape {list(factors.shape)}, but the file's metadata requires "
            f"[{config.head_dim // 2}]; download the file again."
        )
    number = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[
        cast("str", header.metadata["general.architecture"])
    ]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    theirs = {ours: names.get_name(ours, try_suffixes=(".weight", ".bias")) for ours in expected}
    found = {ours: (name, left.pop(name)) for ours, name in theirs.items() if name in left}
    if left:
        raise CheckpointError(
            f"{header.file} has unexpected {listing(left)}; a model of its metadata has no such tensor, so choose "
            "another file."
        )
    return found


def _dtype(name: str, stored: Stored, file: Path) -> np.dtype:
    """Return the dtype that a tensor's values have when they are read."""
    import gguf

    plain = dtypes.BY_SAFETENSORS_CODE.get(stored.kind.name)
    if plain is not None:
        return plain
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[stored.kind][1]), np.uint8)
    try:
        return gguf.dequantize(block, stored.kind).dtype
    except NotImplementedError as error:
        raise CheckpointError(
            f"{name} in {file} is of type {stored.kind.name}, which the gguf library cannot dequantise; choose a file "
            "of another quantisation."
        ) from error


def _in_order(name: str, tensor: GgufTensor, kind: Architecture, config: LlamaConfig) -> GgufTensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
    return dataclasses.replace(tensor, interleaved=heads) if kind.interleaved and heads else tensor


def usual_dtype(found: dict[str, Tensor]) -> np.dtype:
    """Return the tensors' common dtype. If they differ, return float32, which can represent all their values."""
    kinds = {tensor.dtype for tensor in found.values()}
    return kinds.pop() if len(kinds) == 1 else dtypes.BY_NAME["float32"]
