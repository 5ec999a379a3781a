"""Block drafter files: config.json and safetensors, in the layouts of several programs."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from convert.errors import CheckpointError
from convert.from_hf import check_depth, check_names, filled
from convert.heads import draft_vocabulary
from convert.heads import files as head_files
from convert.heads.block import tensor_names
from convert.heads.block.config import BlockConfig, BlockOrigin
from convert.heads.block.parse_config import layout_of, parse
from convert.heads.block.write_config import check_format, describe
from convert.heads.draft_vocabulary import KNOWN, TABLES, TARGET_IDS
from convert.json_file import read_object
from convert.safetensors_reader import Tensor, scan
from convert.source import resolve_config
from convert.to_hf import views_of


@dataclasses.dataclass(frozen=True)
class BlockFiles:
    """A block drafter whose files have been found and checked, but whose weights have not been read yet.

    Attributes:
        draft_ids: the result of `convert.heads.draft_vocabulary.draft_ids`; None if all tokens can be drafted.
    """

    config: BlockConfig
    origin: BlockOrigin
    draft_ids: np.ndarray | None
    tensors: Mapping[str, Tensor]

    def arrays(self, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our name, array) pairs. Raise CheckpointError as in `convert.from_hf.filled`."""
        return filled(self.tensors, tensor_names.entries(self.config), dtype)


def read(source: str | Path, num_layers: int | None = None) -> BlockFiles:
    """Find and check a block drafter's files.

    Args:
        source: a local directory or a Hugging Face repo id.
        num_layers: the target's number of layers. See `convert.heads.block.parse_config.parse`.

    Raises:
        CheckpointError: the files are invalid in any way. Nothing is repaired or skipped.
    """
    directory = head_files.find(source, "pytorch_model.bin")
    path = directory / "config.json"
    raw = read_object(path)
    found = scan(directory, tables=TABLES)
    try:
        layout, config = layout_of(raw), parse(raw, found.keys(), num_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    check_depth(config.body, len(found), directory)
    vocab_size = config.body.vocab_size
    tables = draft_vocabulary.shapes(config.draft_vocab_size, vocab_size, found)
    check_names(found, tensor_names.shapes(config) | tables, directory)
    draft_ids = draft_vocabulary.take(found, vocab_size, directory)
    origin = BlockOrigin(layout, json.dumps(raw), head_files.common_dtype(found))
    return BlockFiles(config, origin, draft_ids, found)


def read_config(source: str | Path, num_layers: int | None = None) -> BlockConfig | None:
    """Read only a block drafter's config.json, and the names of its tensors if their files are there.

    Without tensors, assume that a speculators file has its own embedding and output head, because most do.

    Returns:
        None if config.json is not that of a block drafter.

    Raises:
        CheckpointError: config.json is invalid.
    """
    directory = resolve_config(source)
    path = directory / "config.json"
    raw = read_object(path) if path.is_file() else {}
    try:
        layout = layout_of(raw)
    except CheckpointError:
        return None
    assumed = (tensor_names.EMBEDDING, tensor_names.HEAD) if layout == "speculators" else ()
    names = scan(directory, tables=TABLES).keys() if any(directory.glob("*.safetensors")) else assumed
    try:
        return parse(raw, names, num_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def write(
    destination: str | Path,
    config: BlockConfig,
    arrays: Mapping[str, np.ndarray],
    draft_ids: np.ndarray | None,
    format: str,
    origin: BlockOrigin | None,
) -> Path:
    """Atomically write a block drafter's files.

    Args:
        arrays: our arrays by name, all with the same dtype.
        format: a key of `convert.heads.block.write_config.FORMATS`.
        origin: the files that the drafter was loaded from. If they had the same layout, config.json keeps its fields.

    Raises:
        CheckpointError: programs that read this format would not compute the same result as the drafter, or
            `destination` exists or cannot be written.
    """
    check_format(config, format)
    tensors = views_of(arrays, tensor_names.entries(config))
    if draft_ids is not None and config.draft_vocab_size is not None:
        offsets, known = draft_vocabulary.tables(draft_ids, config.draft_vocab_size)
        tensors |= {TARGET_IDS: offsets, KNOWN: known}
    dtype = next(iter(arrays.values())).dtype.name
    return head_files.write(destination, describe(config, format, dtype, origin, tensors.keys()), tensors)
