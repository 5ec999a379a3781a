"""Loading of checkpoints from Hugging Face directories and repos, converted directories and GGUF files."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from convert import dtypes, from_hf, notes, store, weight_files
from convert.checkpoint import Checkpoint
from convert.config import LlamaConfig, gguf_config, read_config
from convert.gguf import header as gguf_header
from convert.gguf import reader as from_gguf
from convert.source import resolve

Arrays = Iterator[tuple[str, np.ndarray]]


def load(source: str | Path, dtype: DTypeLike | None = None, revision: str | None = None) -> Checkpoint:
    """Read a Hugging Face directory or repo, a converted directory or a GGUF file into NumPy arrays.

    Peak memory use is the size of all arrays in the target dtype plus about one more array.

    Args:
        source: the directory, the GGUF file, or a Hugging Face repo id `org/model`.
        dtype: float32, bfloat16 or float16, as a name or a type; None keeps the stored dtype. Nearly all GGUF
            files are quantised or mix dtypes. For such files, None means float32, which represents every value.
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
    directory = resolve(source, revision)
    if directory.is_file():
        header = gguf_header.read(directory)
        config = gguf_config(header)
        notes.log_gguf(header)
        found = from_gguf.tensors(header, config)
        return config, directory, from_hf.stream(found, config, target or from_gguf.usual_dtype(found))
    if store.is_store(directory):
        store.verify(directory)
        config = read_config(directory)
        return config, directory, store.stream(directory, config, target)
    config = _config(directory)
    notes.log_directory(directory)
    found = from_hf.tensors(directory, config)
    target = from_hf.stored_dtype(found, directory) if target is None else target
    return config, directory, from_hf.stream(found, config, target)


def check(source: str | Path) -> None:
    """Check that `source` is a checkpoint whose files exist, without reading their contents.

    Call this function before reading the tokenizer, because a directory in another layout may lack a tokenizer.

    Raises:
        CheckpointError: the weights or the configuration are missing, or the model is not supported.
    """
    directory = resolve(source)
    if not directory.is_file() and not store.is_store(directory):
        _config(directory)
        weight_files.find(directory)


def _config(directory: Path) -> LlamaConfig:
    if not (directory / "config.json").exists():
        weight_files.find(directory)  # "no weights" says more than "no config.json"
    return read_config(directory)
