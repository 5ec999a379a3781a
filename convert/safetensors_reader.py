"""A Hugging Face directory's tensors: which there are (from the headers alone), and their rows, read lazily.

The safetensors library checks every header; this file checks what it cannot see, the directory as a whole.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from convert import dtypes
from convert.errors import CheckpointError, listing
from convert.json_file import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 16 * 2**20
_TABLES = {"I64": np.dtype(np.int64), "BOOL": np.dtype(np.bool_)}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in a file, not read yet."""

    name: str
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self, rows: slice) -> np.ndarray:
        """A copy of those rows, in the stored dtype.

        The file is mapped anew each time (65 us): mapped pages count as memory in use until they are unmapped.
        """
        with opened(self.file) as handle:
            return handle.get_slice(self.name)[rows]


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error}); download or write it again.") from error


def metadata(file: Path) -> dict[str, str] | None:
    """The free text in the header of a safetensors file.

    Raises:
        CheckpointError: the file is damaged.
    """
    with opened(file) as handle:
        return handle.metadata()


def _scan_file(file: Path, tables: Mapping[str, str]) -> list[Tensor]:
    with opened(file) as handle:
        found = []
        for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
            piece = handle.get_slice(name)
            dtype = _dtype(name, piece.get_dtype(), file, tables)
            found.append(Tensor(name, file, dtype, tuple(piece.get_shape())))
        return found


def _dtype(name: str, code: str, file: Path, tables: Mapping[str, str]) -> np.dtype:
    if name in tables:
        if code != tables[name]:
            raise CheckpointError(f"{name} in {file} is {code}; expected {tables[name]}: restore the model's own file.")
        return _TABLES[code]
    dtype = dtypes.BY_SAFETENSORS_CODE.get(code)
    if dtype is None:
        raise CheckpointError(
            f"{name} in {file} is {code}; expected one of {', '.join(dtypes.BY_SAFETENSORS_CODE)}: choose an "
            "unquantised checkpoint."
        )
    return dtype


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    weight_map = read_object(path).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    # A shard name with a slash could point outside the directory.
    if not weight_map or not all(
        isinstance(n, str) and n.endswith(".safetensors") and Path(n).name == n for n in names
    ):
        raise CheckpointError(
            f"{path} has no usable weight_map; expected tensor names with the names of *.safetensors "
            "files beside it: download it again."
        )
    return weight_map


def _refuse_no_weights(directory: Path) -> None:
    pickles = [file.name for pattern in PICKLES for file in directory.glob(pattern)]
    if pickles:
        raise CheckpointError(
            f"{directory} holds only pickle files ({listing(pickles)}), which can run code when read "
            "and are never opened here; convert them to safetensors, for instance with "
            "transformers' save_pretrained."
        )
    if models := [file.name for file in directory.glob("*.gguf")]:
        raise CheckpointError(
            f"{directory} holds {listing(models)} and no *.safetensors file; name the GGUF file itself, as in "
            f"{directory / sorted(models)[0]}."
        )
    raise CheckpointError(
        f"{directory} holds no *.safetensors file; expected {SINGLE}, or shards with {INDEX}: download the weights too."
    )


def files(directory: Path, single: str = SINGLE) -> list[Path]:
    """The safetensors files of a Hugging Face directory, sorted by name.

    Args:
        single: the file that holds all, where there is no index.

    Raises:
        CheckpointError: there are none, or the set is not what the index names (without an index: not exactly
            `single`).
    """
    present = {file.name for file in directory.glob("*.safetensors")}
    if not present:
        _refuse_no_weights(directory)
    if not (directory / INDEX).exists():
        if present != {single}:
            raise CheckpointError(
                f"{directory} holds {listing(present)} without {INDEX}; expected that index, or {single} "
                "alone: download the index, or move files of other checkpoints away."
            )
        return [directory / single]
    wanted = set(_weight_map(directory).values())
    if wanted - present:
        raise CheckpointError(
            f"{directory} lacks {listing(wanted - present)}, named by {INDEX}; download the checkpoint again."
        )
    if present - wanted:
        raise CheckpointError(
            f"{directory} holds {listing(present - wanted)}, not named by {INDEX}; move files of other "
            "checkpoints away, or download the index again."
        )
    return [directory / name for name in sorted(wanted)]


def scan(directory: Path, single: str = SINGLE, tables: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Name -> tensor for every tensor in a Hugging Face directory, from the headers.

    Args:
        single: as for `files`.
        tables: tensors that are no weights, with their dtype, I64 or BOOL.

    Raises:
        CheckpointError: a file is damaged, missing or too many, a tensor lies in two files or has another
            dtype than F32, BF16, F16, or the index names another file for a tensor than the one it lies in.
    """
    found: dict[str, Tensor] = {}
    for file in files(directory, single):
        for tensor in _scan_file(file, tables or {}):
            if tensor.name in found:
                raise CheckpointError(
                    f"{tensor.name} is in {found[tensor.name].file.name} and in {file.name} of "
                    f"{directory}; download the checkpoint again."
                )
            found[tensor.name] = tensor
    if (directory / INDEX).exists():
        lies = {(name, tensor.file.name) for name, tensor in found.items()}
        wrong = {name for name, _ in lies ^ set(_weight_map(directory).items())}
        if wrong:
            raise CheckpointError(
                f"{directory / INDEX} and the files disagree about {listing(wrong)}; download the checkpoint again."
            )
    return found


def row_chunks(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Slices of axis 0 that cover `shape`, each of about 16 MiB."""
    step = max(1, _CHUNK_BYTES // max(1, itemsize * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
