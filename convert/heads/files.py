"""Functions shared by the readers and writers of trained-head directories. Pickle files are never opened."""

import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np

from convert import weight_files
from convert.destination import new_directory
from convert.errors import CheckpointError, listing
from convert.json_fields import Fields
from convert.json_file import read_object
from convert.other_formats import PICKLES
from convert.safetensors_reader import Tensor, opened
from convert.source import resolve
from convert.to_hf import write_file
from convert.weight_files import SINGLE

OWN = "jspec_drafter"  # model_type of drafters that no other program reads


def find(source: str | Path, pickled: str, single: str = SINGLE) -> Path:
    """Return a head's directory. `source` may be a Hugging Face repo id. See `convert.resolve`.

    Args:
        pickled: the name of the pickle file in which such heads are published.
        single: the name of the safetensors file that the pickle is converted to.

    Raises:
        CheckpointError: the directory does not exist, or holds no safetensors file. The message says how to convert a
            pickle.
    """
    directory = resolve(source)
    if directory.is_file():
        raise CheckpointError(
            f"{directory} is a file; expected the directory of a head, with config.json and {single}."
        )
    if not any(directory.glob("*.safetensors")):
        pickles = sorted(file.name for pattern in PICKLES for file in directory.glob(pattern))
        found = f"only pickle files ({listing(pickles)})" if pickles else "no *.safetensors file"
        raise CheckpointError(
            f"{directory} holds {found}; pickles can run code when read and are never opened here, so if you "
            f"trust the file, convert it with PyTorch: {_snippet(pickles[0] if pickles else pickled, single)}."
        )
    return directory


def kind_of(directory: Path) -> str | None:
    """Return the kind of trained drafter that `directory` holds, or None.

    The kind is the one in jspec's own config.json. Without that file, it is inferred from tensor names: "block",
    "eagle" or "medusa".
    """
    config = directory / "config.json"
    if config.is_file() and (raw := read_object(config)).get("model_type") == OWN:
        return str(raw.get("kind"))
    names: set[str] = set()
    for file in _weights(directory):
        with opened(file) as handle:
            names |= set(handle.keys())
    if {"fc.weight", "hidden_norm.weight"} <= names:
        return "block"
    if names & {"fc.weight", "fusion_fc.weight"}:
        return "eagle"
    heads = {"0.0.linear.weight", "blocks.0.layers.0.weight", "medusa_heads.blocks.0.layers.0.weight"}
    return "medusa" if names & heads else None


def _weights(directory: Path) -> Iterable[Path]:
    """Return the weight files with standard names, or all safetensors files if there are none."""
    try:
        return weight_files.find(directory).files
    except CheckpointError:
        return directory.glob("*.safetensors")


def read_own(directory: Path, kind: str) -> Fields:
    """Return the config.json of one of jspec's own drafters.

    Raises:
        CheckpointError: the file belongs to another kind of drafter, or to none.
    """
    raw = read_object(directory / "config.json")
    if (raw.get("model_type"), raw.get("kind")) != (OWN, kind):
        raise CheckpointError(
            f"{directory / 'config.json'} says model_type {raw.get('model_type')!r} and kind "
            f"{raw.get('kind')!r}; expected {OWN!r} and {kind!r}."
        )
    return raw


@contextmanager
def new_own(destination: Path, kind: str, fields: Mapping[str, object]) -> Generator[Path]:
    """Atomically create a directory in jspec's own drafter format.

    Yield the directory, so that the caller can write the weights, and then add config.json.

    Raises:
        CheckpointError: `destination` exists or cannot be written.
    """
    with new_directory(destination) as directory:
        yield directory
        text = json.dumps({"model_type": OWN, "kind": kind} | cast("Fields", fields), indent=2)
        (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _snippet(pickled: str, single: str) -> str:
    return (
        "`safetensors.torch.save_file({name: tensor.clone().contiguous() for name, tensor in "
        f"torch.load({pickled!r}, weights_only=True).items()}}, {single!r})`"
    )


def common_dtype(found: dict[str, Tensor]) -> str | None:
    """Return the weights' common dtype, or None if they have several."""
    names = {tensor.dtype.name for tensor in found.values()}
    return names.pop() if len(names) == 1 else None


def write(
    destination: str | Path, fields: Mapping[str, object], tensors: dict[str, np.ndarray], single: str = SINGLE
) -> Path:
    """Atomically write a directory with config.json and one safetensors file.

    Raises:
        CheckpointError: `destination` exists or cannot be written.
    """
    destination = Path(destination)
    with new_directory(destination) as directory:
        write_file(directory / single, tensors, {"format": "pt"})
        (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return destination
