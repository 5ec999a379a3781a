"""The mapping from tensors to the source's files, kept so that converting back writes the same files."""

from pathlib import Path
from typing import TypedDict, cast

from convert import from_hf, keymap, store
from convert.config import LlamaConfig
from convert.safetensors_reader import metadata
from convert.weight_files import SINGLE


class File(TypedDict):
    """A safetensors file: the free text in its header, and the Hugging Face names of its tensors."""

    metadata: dict[str, str] | None
    tensors: list[str]


Layout = dict[str, File]  # by file name


def read(directory: Path, config: LlamaConfig) -> Layout:
    """Return a Hugging Face directory's layout, the one stored in a converted directory, or a single file for GGUF.

    Raises:
        CheckpointError: the directory is damaged.
    """
    if directory.is_file():
        return {SINGLE: {"metadata": {"format": "pt"}, "tensors": list(keymap.hf_shapes(config))}}
    if store.is_store(directory):
        return cast("Layout", store.describe(directory)["files"])
    layout: Layout = {}
    for tensor in from_hf.tensors(directory, config).values():
        file = layout.setdefault(tensor.file.name, {"metadata": metadata(tensor.file), "tensors": []})
        file["tensors"].append(tensor.name)
    return layout
