"""Block drafter files: config.json and safetensors, in the layouts of `convert.heads.block.tensor_names`."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from convert.errors import CheckpointError
from convert.from_hf import check_names, filled
from convert.heads import draft_vocabulary
from convert.heads import files as head_files
from convert.heads.block import tensor_names
from convert.heads.block.config import BlockConfig, BlockOrigin
from convert.heads.block.parse_config import layout_of, parse
from convert.heads.block.tensor_names import KNOWN, TARGET_IDS
from convert.heads.block.write_config import check_format, describe
from convert.json_file import read_object
from convert.safetensors_reader import Tensor, scan


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
    found = scan(directory, tables=tensor_names.TABLES)
    try:
        layout, config = layout_of(raw), parse(raw, found.keys(), num_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    tables: dict[str, tuple[int, ...]] = {}
    if config.draft_vocab_size is not None:
        tables = {TARGET_IDS: (config.draft_vocab_size,)}
        tables |= {KNOWN: (config.body.vocab_size,)} if KNOWN in found else {}
    check_names(found, tensor_names.shapes(config) | tables, directory)
    read_tables = {name: found.pop(name).read(slice(None)) for name in tables}
    ids = None
    if config.draft_vocab_size is not None:
        try:
            ids = draft_vocabulary.draft_ids(read_tables[TARGET_IDS], read_tables.get(KNOWN), config.body.vocab_size)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
    origin = BlockOrigin(layout, json.dumps(raw), head_files.common_dtype(found))
    return BlockFiles(config, origin, ids, found)


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
    tensors: dict[str, np.ndarray] = {}
    for entry in tensor_names.entries(config):
        ends = np.cumsum([part.rows for part in entry.parts])
        pieces = np.split(arrays[entry.name], ends[:-1])
        tensors |= {part.hf_name: piece for part, piece in zip(entry.parts, pieces, strict=True)}
    if draft_ids is not None and config.draft_vocab_size is not None:
        offsets, known = draft_vocabulary.tables(draft_ids, config.draft_vocab_size)
        tensors |= {TARGET_IDS: offsets, KNOWN: known}
    dtype = next(iter(arrays.values())).dtype.name
    return head_files.write(destination, describe(config, format, dtype, origin, tensors.keys()), tensors)
