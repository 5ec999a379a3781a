"""Read a Hugging Face directory lazily: list the tensors from the headers alone, and read rows on demand.

The safetensors library checks each header. This module checks the directory as a whole, which the library cannot see.
"""

import dataclasses
import json
import math
import re
import struct
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import EllipsisType
from typing import Protocol, TypeAlias, cast

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from convert import dtypes, placeholders, weight_files
from convert.errors import CheckpointError, listing
from convert.weight_files import INDEX, SINGLE

_UNKNOWN_DTYPE = re.compile(r"unknown variant `(\w+)`")  # in the library's error message
_CHUNK_BYTES = 16 * 2**20
_TABLES = {"I64": np.dtype(np.int64), "BOOL": np.dtype(np.bool_)}
_FLOAT8 = "F8_E4M3"
# The dtypes of the tensors that store quantised weights.
QUANTIZED = {
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    _FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn),
}
Index: TypeAlias = slice | tuple[slice, ...] | EllipsisType


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor whose values have not been read from its file yet."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, rows: slice) -> np.ndarray:
        """Return a copy of `rows`, in the stored dtype.

        Each call maps the file anew (65 us), because mapped pages count as memory in use until they are unmapped.
        """
        return self.read_part(rows)

    def read_part(self, index: Index) -> np.ndarray:
        """Return a copy of the values at `index`, which may also select columns; `...` selects everything."""
        with opened(self.file) as handle:
            return handle.get_slice(self.name)[index]

    @property
    def format(self) -> str:
        """The name of the tensor's format. The tensor can be packed if this is a key of `convert.blocks.FORMATS`."""
        return {dtype: code for code, dtype in dtypes.BY_SAFETENSORS_CODE.items()}.get(self.dtype, "")

    def read_stored(self, rows: slice) -> np.ndarray:
        """Return a copy of `rows` of a matrix as the file stores them, ``uint8[rows, row_bytes]``."""
        return np.ascontiguousarray(self.read(rows)).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class Float8Tensor(Tensor):
    """A tensor of dtype float8_e4m3fn. safetensors cannot read it, because NumPy itself has no such dtype.

    Attributes:
        offset: the position of the tensor's first byte in the file.
    """

    offset: int

    def read_part(self, index: Index) -> np.ndarray:
        whole = (slice(None),) if index is ... else index
        rows, *columns = whole if isinstance(whole, tuple) else (whole,)
        start, stop, _ = rows.indices(self.shape[0] if self.shape else 1)
        width = math.prod(self.shape[1:])
        count = (stop - start) * width
        try:
            data = np.fromfile(self.file, np.uint8, count, offset=self.offset + start * width)
        except OSError as error:
            raise CheckpointError(
                f"{self.file} cannot be read ({error}); check its permissions and the disk."
            ) from error
        if data.size != count:
            raise CheckpointError(f"{self.file} was cut short while it was read; load it again.")
        return data.view(self.dtype).reshape(-1, *self.shape[1:])[(slice(None), *columns)]


class Slice(Protocol):
    """A tensor in an open file, as safetensors returns it."""

    def __getitem__(self, index: Index, /) -> np.ndarray: ...

    def get_dtype(self) -> str: ...

    def get_shape(self) -> list[int]: ...


class Handle(Protocol):
    """An open safetensors file."""

    def keys(self) -> list[str]: ...

    def metadata(self) -> dict[str, str] | None: ...

    def get_slice(self, name: str, /) -> Slice: ...


@contextmanager
def opened(file: Path) -> Generator[Handle]:
    try:
        with cast("AbstractContextManager[Handle]", safe_open(file, framework="numpy")) as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        placeholders.check(file)
        if unknown := _UNKNOWN_DTYPE.search(str(error)):
            raise CheckpointError(
                f"{file} has tensors of dtype {unknown[1]}, which safetensors {version('safetensors')} does not know; "
                f"choose a checkpoint in {', '.join(dtypes.BY_SAFETENSORS_CODE)}."
            ) from error
        raise CheckpointError(f"{file} is damaged or cut short ({error}); download or write it again.") from error


def metadata(file: Path) -> dict[str, str] | None:
    """Return the free-form metadata in a safetensors header.

    Raises:
        CheckpointError: the file is damaged.
    """
    with opened(file) as handle:
        return handle.metadata()


def _scan_file(file: Path, tables: Mapping[str, str], extra_dtypes: Mapping[str, np.dtype]) -> list[Tensor]:
    with opened(file) as handle:
        found: list[Tensor] = []
        for name in handle.keys():  # noqa: SIM118  (the handle is not a mapping)
            piece = handle.get_slice(name)
            dtype = _dtype(name, piece.get_dtype(), file, tables, extra_dtypes)
            found.append(Tensor(name, file, dtype, tuple(piece.get_shape())))
    return _with_offsets(found, file)


def _with_offsets(found: list[Tensor], file: Path) -> list[Tensor]:
    """Return `found` with each float8 tensor as a `Float8Tensor`. safetensors has already checked the header."""
    if not any(tensor.dtype == QUANTIZED[_FLOAT8] for tensor in found):
        return found
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = cast("dict[str, dict[str, list[int]]]", json.loads(stream.read(size)))
    return [
        Float8Tensor(**vars(tensor), offset=8 + size + header[tensor.name]["data_offsets"][0])
        if tensor.dtype == QUANTIZED[_FLOAT8]
        else tensor
        for tensor in found
    ]


def _dtype(
    name: str, code: str, file: Path, tables: Mapping[str, str], extra_dtypes: Mapping[str, np.dtype]
) -> np.dtype:
    if name in tables:
        if code != tables[name]:
            raise CheckpointError(f"{name} in {file} is {code}; expected {tables[name]}: restore the model's own file.")
        return _TABLES[code]
    known: dict[str, np.dtype] = {**dtypes.BY_SAFETENSORS_CODE, **extra_dtypes}
    dtype = known.get(code)
    if dtype is None:
        advice = (
            "" if extra_dtypes else ", or restore the config.json whose quantization_config describes these weights"
        )
        raise CheckpointError(
            f"{name} in {file} is {code}; expected one of {', '.join(known)}: choose a "
            f"checkpoint in one of these dtypes{advice}."
        )
    return dtype


def scan(
    directory: Path,
    single: str = SINGLE,
    tables: Mapping[str, str] | None = None,
    is_optional: Callable[[str], bool] = lambda name: False,
    extra_dtypes: Mapping[str, np.dtype] | None = None,
) -> dict[str, Tensor]:
    """Return every tensor of a Hugging Face directory by name, reading only the headers.

    Args:
        single: see `convert.weight_files.find`.
        tables: the tensors that are not weights, with their dtypes (I64 or BOOL).
        is_optional: returns whether the index and the files may disagree about whether a given tensor exists.
        extra_dtypes: further dtypes that a tensor may have, keyed by their names in safetensors.

    Raises:
        CheckpointError: a file is damaged or missing; a tensor is in two files; a dtype is not F32, BF16, F16 or in
            `extra_dtypes`; or the index maps a tensor to a file that does not hold it.
    """
    chosen = weight_files.find(directory, single)
    found: dict[str, Tensor] = {}
    for file in chosen.files:
        for tensor in _scan_file(file, tables or {}, extra_dtypes or {}):
            if tensor.name in found:
                raise CheckpointError(
                    f"{tensor.name} is in {found[tensor.name].file.name} and in {file.name} of "
                    f"{directory}; download the checkpoint again."
                )
            found[tensor.name] = tensor
    if chosen.weight_map is not None:
        lies = {(name, tensor.file.name) for name, tensor in found.items()}
        wrong = {name for name, _ in lies ^ set(chosen.weight_map.items()) if not is_optional(name)}
        if wrong:
            raise CheckpointError(
                f"{directory / INDEX} and the files disagree about {listing(wrong)}; download the checkpoint again."
            )
    return found


def row_chunks(shape: tuple[int, ...], itemsize: int, multiple: int = 1) -> Iterator[slice]:
    """Yield slices of axis 0 that cover `shape`, each of about 16 MiB. Slices begin at multiples of `multiple`."""
    step = max(1, _CHUNK_BYTES // max(1, itemsize * math.prod(shape[1:])) // multiple) * multiple
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
