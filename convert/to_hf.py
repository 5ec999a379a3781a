# pyright: reportUnknownVariableType=false
"""Convert our arrays to Hugging Face safetensors files: the exact reverse of from_hf.py."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from convert import keymap
from convert.config import LlamaConfig
from convert.errors import CheckpointError
from convert.shard_layout import Layout
from convert.weight_files import INDEX, SINGLE


def views_of(arrays: Mapping[str, np.ndarray], entries: Iterable[keymap.Entry]) -> dict[str, np.ndarray]:
    """Map each Hugging Face tensor name to a view of the rows of our arrays that make up the tensor."""
    views: dict[str, np.ndarray] = {}
    for entry in entries:
        start = 0
        for part in entry.parts:
            views[part.hf_name] = arrays[entry.name][start : start + part.rows]
            start += part.rows
    return views


def _write_index(directory: Path, views: dict[str, np.ndarray], layout: Layout) -> None:
    weight_map = {name: file for file, content in layout.items() for name in content["tensors"]}
    index = {
        "metadata": {
            "total_parameters": sum(views[name].size for name in weight_map),
            "total_size": sum(views[name].nbytes for name in weight_map),
        },
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_file(path: Path, views: dict[str, np.ndarray], metadata: dict[str, str] | None) -> None:
    """Call `save_file`, and set the file's permissions from the umask, as for any other file.

    By default, safetensors makes the file readable only by its owner.

    Raises:
        CheckpointError: the file could not be written.
    """
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(views, path, metadata)
        path.chmod(mode)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} could not be written ({error}); check the disk's free space and permissions."
        ) from error


def write(directory: Path, params: dict[str, np.ndarray], config: LlamaConfig, layout: Layout) -> None:
    """Write the safetensors files of `layout`, and their index unless model.safetensors is the only file.

    Raises:
        CheckpointError: a file could not be written.
    """
    views = views_of(params, keymap.entries(config))
    views.setdefault(keymap.HEAD, views[keymap.EMBEDDING])
    for file, content in layout.items():
        write_file(directory / file, {name: views[name] for name in content["tensors"]}, content["metadata"])
    if set(layout) != {SINGLE}:
        _write_index(directory, views, layout)
