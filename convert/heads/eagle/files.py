"""EAGLE head files: config.json and safetensors, in the layouts of `convert.heads.eagle.tensor_names`."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from convert.errors import CheckpointError
from convert.from_hf import check_names, filled
from convert.heads import draft_vocabulary
from convert.heads import files as head_files
from convert.heads.draft_vocabulary import KNOWN, TABLES, TARGET_IDS
from convert.heads.eagle import tensor_names as eagle_keys
from convert.heads.eagle import write_config as eagle_json
from convert.heads.eagle.config import EagleConfig, EagleOrigin
from convert.heads.eagle.parse_config import layout_of, parse
from convert.heads.eagle.tensor_names import LAYOUTS
from convert.json_file import read_object
from convert.safetensors_reader import Tensor, scan
from convert.to_hf import views_of


@dataclasses.dataclass(frozen=True)
class EagleFiles:
    """A head whose files have been found and checked, but whose weights have not been read yet.

    Attributes:
        config: the head's config. `own_head` is false if the files lack an output head, even with a reduced vocabulary.
        draft_ids: the result of `convert.heads.draft_vocabulary.draft_ids`; None if all tokens can be drafted.
    """

    config: EagleConfig
    origin: EagleOrigin
    draft_ids: np.ndarray | None
    tensors: Mapping[str, Tensor]

    def arrays(self, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our name, array) pairs. Raise CheckpointError as in `convert.from_hf.filled`."""
        entries = eagle_keys.entries(self.config, self.origin.layout, self.origin.prefix)
        return filled(self.tensors, entries, dtype)


def read(source: str | Path, num_layers: int | None = None) -> EagleFiles:
    """Find and check a head's files.

    Args:
        source: a local directory or a Hugging Face repo id.
        num_layers: the target's number of layers. See `convert.heads.eagle.parse_config.parse`.

    Raises:
        CheckpointError: the files are invalid in any way. Nothing is repaired or skipped.
    """
    directory = head_files.find(source, "pytorch_model.bin")
    path = directory / "config.json"
    raw = read_object(path)
    found = scan(directory, tables=TABLES)
    try:
        layout, config = layout_of(raw, found.keys()), parse(raw, found.keys(), num_layers)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    prefix = _prefix(layout, found)
    vocab_size, names = config.layer.vocab_size, tuple(sorted(found))
    tables = draft_vocabulary.shapes(config.draft_vocab_size, vocab_size, names)
    check_names(found, eagle_keys.shapes(config, layout, prefix) | tables, directory)
    draft_ids = draft_vocabulary.take(found, vocab_size, directory)
    origin = EagleOrigin(layout, prefix, names, json.dumps(raw), head_files.common_dtype(found))
    return EagleFiles(config, origin, draft_ids, found)


def _prefix(layout: str, names: Iterable[str]) -> str:
    """Return the layer's tensor-name prefix. Generation 3 has two spellings, and vLLM reads both."""
    default_prefix = LAYOUTS[layout].prefix
    if LAYOUTS[layout].generation == 1:
        return default_prefix
    other = "layers.0." if default_prefix == "midlayer." else "midlayer."
    return default_prefix if any(name.startswith(default_prefix) for name in names) else other


def write(
    destination: str | Path,
    config: EagleConfig,
    arrays: Mapping[str, np.ndarray],
    draft_ids: np.ndarray | None,
    layout: str,
    origin: EagleOrigin | None,
) -> Path:
    """Atomically write a head's files.

    Args:
        config: the head's config. If `own_head` is false, no output head is written, even with a reduced vocabulary.
        arrays: our arrays by name, all with the same dtype.
        origin: the files that the head was loaded from. If their layout is `layout`, tensors keep their names and
            config.json keeps its fields.

    Raises:
        CheckpointError: programs that read `layout` would not compute the same result as the head, or `destination`
            exists or cannot be written.
    """
    eagle_json.check_format(config, layout)
    same = origin if origin is not None and origin.layout == layout else None
    tensors = views_of(arrays, eagle_keys.entries(config, layout, None if same is None else same.prefix))
    if draft_ids is not None and config.draft_vocab_size is not None:
        offsets, known = draft_vocabulary.tables(draft_ids, config.draft_vocab_size)
        tensors[TARGET_IDS] = offsets
        if same is None or KNOWN in same.names:
            tensors[KNOWN] = known
    dtype = next(iter(arrays.values())).dtype.name
    fields = eagle_json.describe(config, layout, dtype, same, tensors.keys())
    return head_files.write(destination, fields, tensors)
