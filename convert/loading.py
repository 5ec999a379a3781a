"""Load checkpoints from Hugging Face directories and repos, converted directories and GGUF files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from convert import dtypes, from_hf, keymap, notes, store, weight_files
from convert.blocks import StoredParts
from convert.checkpoint import Checkpoint
from convert.config import LlamaConfig, gguf_config, read_config
from convert.gguf import header as gguf_header
from convert.gguf import reader as from_gguf
from convert.safetensors_reader import Tensor
from convert.source import resolve_weights
from convert.stored_array import StoredArray, stored_arrays

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

Arrays = Iterator[tuple[str, np.ndarray]]
PackedArrays = Iterator[tuple[str, np.ndarray | StoredParts]]


def load(source: str | Path, dtype: DTypeLike | None = None, revision: str | None = None) -> Checkpoint:
    """Read a Hugging Face directory or repo, a converted directory or a GGUF file into NumPy arrays.

    Peak memory use is the size of all arrays in the target dtype plus about one more array.

    Args:
        source: the directory, the GGUF file, a Hugging Face repo id `org/repo`, or a GGUF file in such a repo,
            `org/repo:file.gguf`.
        dtype: float32, bfloat16 or float16, as a name or a type; None keeps the stored dtype. Nearly all GGUF
            files are quantised or mix dtypes. For such files and for quantised safetensors, None means float32, which
            represents every value.
        revision: branch, tag or commit of a Hugging Face repo.

    Raises:
        CheckpointError: the checkpoint is invalid in any way. Nothing is repaired or skipped.
    """
    config, directory, arrays = stream(source, dtype, revision)
    return Checkpoint(config, dict(arrays), directory)


def stream(source: str | Path, dtype: DTypeLike | None, revision: str | None) -> tuple[LlamaConfig, Path, Arrays]:
    """Return the config, the local path, and an iterator over the arrays of `load`, so that callers can show progress.

    Raises:
        CheckpointError: under the same conditions as `load`, either immediately or while the arrays are read.
    """
    target = None if dtype is None else dtypes.parse(dtype)
    config, directory, found = _open(source, revision)
    if found is None:
        return config, directory, store.stream(directory, config, target)
    return config, directory, from_hf.stream(found, config, target or _usual_dtype(found, directory))


def stream_packed(source: str | Path, dtype: DTypeLike) -> tuple[LlamaConfig, Path, PackedArrays]:
    """Return the same as `stream`, but leave each matrix as it is stored if its format can be packed (see `blocks`).

    Raises:
        CheckpointError: under the same conditions as `stream`.
    """
    target = dtypes.parse(dtype)
    config, directory, found = _open(source, None)
    if found is None:
        return config, directory, store.stream_packed(directory, config, target)
    return config, directory, from_hf.stream_packed(found, config, target)


def stream_parts(
    source: str | Path, dtype: DTypeLike, sharding: "Callable[[str, tuple[int, ...]], Sharding]"
) -> tuple[LlamaConfig, Path, "Iterator[tuple[str, StoredArray | jax.Array]]"]:
    """Return the config, the local path and the arrays, as `stream` does, but without loading whole arrays.

    Args:
        sharding: a function from an array's name and shape to its sharding. It is used only for converted directories,
            whose arrays are returned as JAX arrays. Other arrays are returned as `StoredArray`, without being read.

    Raises:
        CheckpointError: under the same conditions as `stream`.
    """
    target = dtypes.parse(dtype)
    config, directory, found = _open(source, None)
    if found is None:
        return config, directory, store.stream_sharded(directory, config, target, sharding)
    return config, directory, stored_arrays(found, keymap.entries(config), target)


def _open(source: str | Path, revision: str | None) -> tuple[LlamaConfig, Path, dict[str, Tensor] | None]:
    """Return the config, the local path, and the tensors by Hugging Face name (None for a converted directory)."""
    directory = resolve_weights(source, revision)
    if directory.is_file():
        header = gguf_header.read(directory)
        config = gguf_config(header)
        notes.log_gguf(header)
        return config, directory, from_gguf.tensors(header, config)
    if store.is_store(directory):
        store.verify(directory)
        return read_config(directory), directory, None
    config = _config(directory)
    notes.log_directory(directory)
    return config, directory, from_hf.tensors(directory, config)


def _usual_dtype(found: dict[str, Tensor], source: Path) -> np.dtype:
    return from_gguf.usual_dtype(found) if source.is_file() else from_hf.stored_dtype(found, source)


def check(source: str | Path) -> None:
    """Check that `source` is a checkpoint whose files exist, without reading their contents.

    Call this function before reading the tokenizer, because a directory in another layout may lack a tokenizer.

    Raises:
        CheckpointError: the weights or the configuration are missing, or the model is not supported.
    """
    directory = resolve_weights(source)
    if not directory.is_file() and not store.is_store(directory):
        _config(directory)
        weight_files.find(directory)


def _config(directory: Path) -> LlamaConfig:
    if not (directory / "config.json").exists():
        weight_files.find(directory)  # "no weights" says more than "no config.json"
    return read_config(directory)
