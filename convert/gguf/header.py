"""Read GGUF headers strictly: check each count and length against the file size before using it.

The gguf library's own reader does not make these checks. The format is specified at
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, TypeVar, overload

import numpy as np

from convert import placeholders
from convert.errors import CheckpointError
from convert.gguf import tensor_types as gguf_types
from convert.json_file import Json

if TYPE_CHECKING:
    import gguf

T = TypeVar("T")
_Info = tuple[int, tuple[int, ...], int]  # type, shape, offset
MAGIC = b"GGUF"
_BEFORE_GGUF = b"lmgg", b"fmgg", b"tjgg", b"algg"  # ggml, ggmf, ggjt, ggla
_VERSIONS = (2, 3)
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
# Limits that no model reaches. They bound the memory and time that a damaged header can cost.
_MOST = 2**21
_LONGEST = 2**26
_LONGEST_NAME = 2**8


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in the file: its type (a `gguf.GGMLQuantizationType`), its shape in NumPy order, and its byte range."""

    kind: "gguf.GGMLQuantizationType"
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """Everything in `file` that precedes the tensor data."""

    file: Path
    metadata: dict[str, Json]
    tensors: dict[str, Stored]


class _Reader:
    """A sequential reader of numbers and strings. It raises ValueError at the end of the file and on invalid values."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self.size, self.at = stream, size, 0

    def take(self, count: int) -> bytes:
        data = self._stream.read(count) if count <= self.size - self.at else b""
        if len(data) != count:
            raise ValueError(f"{count} bytes expected at byte {self.at} of {self.size}")
        self.at += count
        return data

    @overload
    def number(self, kind: Literal[4, 10]) -> int: ...

    @overload
    def number(self, kind: int) -> float: ...

    def number(self, kind: int) -> float:
        code = _NUMBERS[kind]
        (value,) = struct.unpack(code, self.take(struct.calcsize(code)))
        if kind == _BOOL and value > 1:
            raise ValueError(f"boolean {value} before byte {self.at}")
        # The shortest decimal that rounds to this float32, such as 1e-05, as it was in config.json.
        return float(str(np.float32(value))) if kind == _FLOAT32 else bool(value) if kind == _BOOL else value

    def count(self, most: int = _MOST) -> int:
        (value,) = struct.unpack("<Q", self.take(8))
        if value > most:
            raise ValueError(f"count of {value} before byte {self.at}")
        return value

    def string(self) -> str:
        return self.take(self.count(_LONGEST)).decode("utf-8")

    def value(self, kind: int) -> Json:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number(4), self.count())
        if kind not in _NUMBERS:
            raise ValueError(f"unknown value type {kind} before byte {self.at}")
        return self.number(kind)

    def _array(self, kind: int, count: int) -> list[Json]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"array of unsupported type {kind} before byte {self.at}")
        code = _NUMBERS[kind]
        return np.frombuffer(self.take(count * struct.calcsize(code)), np.dtype(code)).tolist()

    def named(self, what: Callable[[], T]) -> tuple[str, T]:
        name, at = self.string(), self.at
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise ValueError(f"invalid name {name[:20]!r} before byte {at}")
        try:
            return name, what()
        except ValueError as error:
            raise ValueError(f"{name!r} at byte {at}: {error}") from error

    def table(self, count: int, what: Callable[[], T]) -> dict[str, T]:
        """Read `count` names, each with the value that follows it."""
        table: dict[str, T] = {}
        for _ in range(count):
            name, content = self.named(what)
            if name in table:
                raise ValueError(f"{name!r} appears twice")
            table[name] = content
        return table


def read(file: Path) -> Header:
    """Read the header of `file`, and check that its tensors fill the rest of the file.

    Raises:
        CheckpointError: the file is not a GGUF file, is damaged or cut short, is one of several parts, or has tensors
            of unknown types.
    """
    try:
        with file.open("rb", buffering=2**20) as stream:
            reader = _Reader(stream, os.fstat(stream.fileno()).st_size)
            num_tensors, num_keys = _preamble(reader, file)
            metadata = reader.table(num_keys, lambda: reader.value(reader.number(4)))
            _check_whole(metadata, file)
            infos = reader.table(num_tensors, lambda: _info(reader))
            return Header(file, metadata, _placed(infos, reader, metadata.get("general.alignment", 32), file))
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        placeholders.check(file)
        raise CheckpointError(f"{file} is damaged or cut short ({error}); download or write it again.") from error


def _preamble(reader: _Reader, file: Path) -> tuple[int, int]:
    if (magic := reader.take(4)) != MAGIC:
        placeholders.check(file)
        if magic in _BEFORE_GGUF:
            raise CheckpointError(f"{file} is in GGML, the format before GGUF; choose a GGUF file of the model.")
        raise CheckpointError(
            f"{file} begins with {magic!r}; expected a GGUF file, which begins with {MAGIC!r}: choose another file."
        )
    version = reader.number(4)
    if version & 0xFFFF == 0 and version:
        raise CheckpointError(
            f"{file} is in big-endian byte order; convert it in place with `gguf-convert-endian {file} little`, or "
            "choose a little-endian file."
        )
    if version not in _VERSIONS:
        raise CheckpointError(f"{file} is GGUF version {version}, but must be version 2 or 3; choose another file.")
    return reader.count(), reader.count()


def _check_whole(metadata: dict[str, Json], file: Path) -> None:
    parts = metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{file} is one of {str(parts)[:20]} parts; join them with `llama-gguf-split --merge FIRST_PART OUT.gguf` "
            "and pass that file."
        )


def _info(reader: _Reader) -> _Info:
    """Return a tensor's (type, shape, offset). The file stores the last dimension first."""
    dimensions = reader.number(4)
    if not 1 <= dimensions <= 4:
        raise ValueError(f"{dimensions} dimensions")
    shape = tuple(reader.number(10) for _ in range(dimensions))[::-1]
    return reader.number(4), shape, reader.number(10)


def _placed(infos: dict[str, _Info], reader: _Reader, alignment: Json, file: Path) -> dict[str, Stored]:
    """Return the tensors with their positions in the file, which must be consecutive, as llama.cpp also requires."""
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {str(alignment)[:20]!r}, which is not a power of two")
    start = end = reader.at + -reader.at % alignment
    tensors: dict[str, Stored] = {}
    last = reader.at
    for name, (number, shape, offset) in infos.items():
        kind, nbytes = _stored_as(name, number, shape, file)
        if offset != end - start:
            raise ValueError(f"{name!r} starts at {offset} of the data, expected {end - start}")
        tensors[name] = Stored(kind, shape, end, nbytes)
        last = end + nbytes
        end = last + -last % alignment
    if not last <= reader.size <= end:
        raise ValueError(f"it has {reader.size} bytes, expected {last}")
    return tensors


def _stored_as(name: str, number: int, shape: tuple[int, ...], file: Path) -> "tuple[gguf.GGMLQuantizationType, int]":
    """Return a tensor's type and its size in bytes."""
    import gguf  # lazily: the import is slow, and only GGUF files need it

    kind = gguf_types.kind(name, number, file)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % block:
        raise ValueError(f"{name!r} has shape {list(shape)}, but {kind.name} has blocks of {block}")
    return kind, math.prod(shape) // block * nbytes
