"""Writes a checkpoint as a converted (Orbax) directory or as a Hugging Face directory."""

from pathlib import Path

import numpy as np

from convert import dtypes, layout, manifest, store, to_hf
from convert.checkpoint import Checkpoint
from convert.config import read_config
from convert.destination import carry, new_directory
from convert.errors import CheckpointError
from convert.keymap import shapes


def _checked(checkpoint: Checkpoint, destination: Path) -> dict[str, np.ndarray]:
    """The arrays in host memory, after a look at everything that could not be written faithfully."""
    source = checkpoint.directory
    if destination.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{destination} lies in {source}; choose a directory outside the source.")
    if read_config(source) != checkpoint.config:
        raise CheckpointError(
            f"the config differs from {source / 'config.json'}, which is carried along; load the checkpoint again."
        )
    expected = shapes(checkpoint.config)
    if {name: tuple(array.shape) for name, array in checkpoint.params.items()} != expected:
        raise CheckpointError("the arrays are not those of shapes(config); keep every name and shape as loaded.")
    arrays = {name: np.asarray(checkpoint.params[name]) for name in expected}
    if len({dtypes.parse(array.dtype) for array in arrays.values()}) > 1:
        raise CheckpointError("the arrays have more than one dtype; cast them to one.")
    return arrays


def save(checkpoint: Checkpoint, destination: str | Path) -> Path:
    """Writes arrays (Orbax), config.json, tokenizer files and a sha256 manifest; atomic.

    Returns:
        `destination`, which `load` reads.

    Raises:
        CheckpointError: `destination` exists or cannot be written, or params and config do not match.
    """
    destination = Path(destination)
    arrays = _checked(checkpoint, destination)
    files = layout.read(checkpoint.directory, checkpoint.config)
    with new_directory(destination) as directory:
        carry(checkpoint.directory, directory)
        store.write(directory, arrays, files)
        manifest.write(directory)
    return destination


def save_hf(checkpoint: Checkpoint, destination: str | Path) -> Path:
    """Writes a Hugging Face directory: the files of the original source, config.json as it was; atomic.

    Where no dtype was changed on the way every tensor is byte for byte that of the source. (After a change,
    config.json still names the source's dtype: transformers casts to that unless told otherwise.)

    Returns:
        `destination`.

    Raises:
        CheckpointError: as `save`.
    """
    destination = Path(destination)
    arrays = _checked(checkpoint, destination)
    files = layout.read(checkpoint.directory, checkpoint.config)
    with new_directory(destination) as directory:
        to_hf.write(directory, arrays, checkpoint.config, files)
        carry(checkpoint.directory, directory)
    return destination
