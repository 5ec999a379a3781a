"""Create output directories atomically, and copy the small files that accompany the weights."""

import json
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from convert.errors import CheckpointError
from convert.generation_config import NAME
from convert.gguf import header as gguf_header
from convert.gguf import tokenizer as gguf_tokenizer
from convert.gguf.config import raw_config, raw_generation_config
from convert.json_file import read_object
from convert.quantized.methods import SECTIONS
from convert.source import PARTIAL
from convert.store import DESCRIPTION
from convert.unfinished import deleted_in_the_end
from convert.weight_files import INDEX

_CARRIED = ("*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt")
_ADAPTER = {"adapter_config.json"}  # with this file, PEFT would look for the adapter, which is not copied
_QUANTIZED = {"quantize_config.json", "quant_config.json"}  # files that AutoGPTQ and AutoAWQ write beside config.json


@contextmanager
def new_directory(destination: Path) -> Generator[Path]:
    """Yield a new directory next to `destination`, and rename it to `destination` if the block ends without an error.

    If the process is killed, the temporary directory remains. `resolve` recognises its name and rejects it.

    Raises:
        CheckpointError: `destination` exists or cannot be written.
    """
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists and is not overwritten; delete it or choose another name.")
    temporary = destination.with_name(f".{destination.name}{PARTIAL}{secrets.token_hex(4)}")
    try:
        with deleted_in_the_end(temporary):
            _make(temporary)
            yield temporary
            temporary.rename(destination)
    except OSError as error:
        raise CheckpointError(
            f"{destination} could not be written ({error}); check the disk's free space and permissions."
        ) from error


def _make(folder: Path) -> None:
    """Create `folder` and its parents. The error names the parent, because users do not know the temporary name.

    Raises:
        CheckpointError: one of the folders cannot be created.
    """
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"nothing can be created in {folder.parent} ({error.strerror}); choose a place that exists and is writable."
        ) from error


def carry(source: Path, target: Path) -> None:
    """Copy the configuration and tokenizer files byte for byte. config.json is last, because nothing loads without it.

    If the source's weights are quantised, config.json is written without its quantisation section, because the written
    weights are dequantised. For a GGUF file, generate these files from its metadata, which contains the same
    information.
    """
    if source.is_file():
        header = gguf_header.read(source)
        gguf_tokenizer.write(header, target)
        if generation := raw_generation_config(header):
            (target / NAME).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
        (target / "config.json").write_text(json.dumps(raw_config(header), indent=2) + "\n", encoding="utf-8")
        return
    names = {file.name for pattern in _CARRIED for file in source.glob(pattern) if file.is_file()}
    for name in sorted(
        names - {INDEX, DESCRIPTION, *_ADAPTER, *_QUANTIZED}, key=lambda name: (name == "config.json", name)
    ):
        shutil.copyfile(source / name, target / name)
    _write_dense_config(source / "config.json", target / "config.json")


def _write_dense_config(source: Path, target: Path) -> None:
    """If `source` has a quantisation section, write it to `target` without this section."""
    if source.exists() and any((raw := read_object(source)).get(key) is not None for key in SECTIONS):
        kept = {key: value for key, value in raw.items() if key not in SECTIONS}
        target.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
