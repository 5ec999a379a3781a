"""Save a checkpoint as a converted (Orbax) directory or as a Hugging Face directory."""

import json
from pathlib import Path
from typing import cast

import numpy as np

from convert import config_json as llama_json
from convert import dtypes, manifest, store, to_hf
from convert import shard_layout as layout
from convert.architectures import FAMILIES
from convert.checkpoint import Checkpoint
from convert.config import LlamaConfig, read_config
from convert.destination import carry, new_directory
from convert.errors import CheckpointError
from convert.generation_config import NAME
from convert.keymap import hf_shapes, shapes
from convert.weight_files import SINGLE


def _checked(checkpoint: Checkpoint, destination: Path) -> dict[str, np.ndarray]:
    """Check that the checkpoint can be written faithfully, and return its arrays in host memory."""
    source = checkpoint.directory
    if destination.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{destination} is inside {source}; choose a directory outside the source.")
    if read_config(source) != checkpoint.config:
        raise CheckpointError(
            f"the config differs from {source / 'config.json'}, which is copied unchanged; load the checkpoint again."
        )
    expected = shapes(checkpoint.config)
    if {name: tuple(array.shape) for name, array in checkpoint.params.items()} != expected:
        raise CheckpointError("the arrays are not those of shapes(config); keep every name and shape as loaded.")
    arrays = {name: np.asarray(checkpoint.params[name]) for name in expected}
    if len({dtypes.parse(array.dtype) for array in arrays.values()}) > 1:
        raise CheckpointError("the arrays have more than one dtype; cast them all to the same dtype.")
    return arrays


def save(checkpoint: Checkpoint, destination: str | Path) -> Path:
    """Atomically write the arrays (Orbax), config.json, the tokenizer files and a SHA-256 manifest.

    Returns:
        `destination`. `load` can read it.

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
    """Atomically write a Hugging Face directory with the original source's files and an unchanged config.json.

    If the dtype was not changed, every tensor equals the source's, byte for byte. After a change, config.json still
    names the source's dtype, so transformers casts to that dtype unless its caller chooses another one.

    Returns:
        `destination`.

    Raises:
        CheckpointError: under the same conditions as `save`.
    """
    destination = Path(destination)
    arrays = _checked(checkpoint, destination)
    files = layout.read(checkpoint.directory, checkpoint.config)
    with new_directory(destination) as directory:
        to_hf.write(directory, arrays, checkpoint.config, files)
        carry(checkpoint.directory, directory)
    return destination


def save_new(
    config: LlamaConfig, arrays: dict[str, np.ndarray], destination: str | Path, source: Path | None = None
) -> Path:
    """Atomically write a Hugging Face directory for a model that was not loaded from files.

    The directory holds config.json and model.safetensors.

    Args:
        source: a checkpoint whose tokenizer the model shares. Its tokenizer files are also copied.

    Raises:
        CheckpointError: `destination` exists or cannot be written, or no config.json can describe the model.
    """
    if config.qkv_bias and (config.qk_norm or config.attention_bias or config.mlp_bias):
        raise CheckpointError(
            "only Qwen2 has biases on q, k and v alone, and it has no other biases and no query or key norms; no "
            "config.json can describe this model."
        )
    destination, dtype = Path(destination), next(iter(arrays.values())).dtype.name
    fields = llama_json.fields(config) | {"dtype": dtype, "torch_dtype": dtype}
    if config.qkv_bias:
        fields["model_type"] = "qwen2"
    fields["architectures"] = [FAMILIES[cast("str", fields["model_type"])].class_name]
    files: layout.Layout = {SINGLE: {"metadata": {"format": "pt"}, "tensors": list(hf_shapes(config))}}
    with new_directory(destination) as directory:
        to_hf.write(directory, arrays, config, files)
        if source is not None:
            carry(source, directory)
        if values := config.sampling.fields():
            (directory / NAME).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return destination
