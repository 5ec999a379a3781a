"""Medusa head files: config.json and safetensors, in the layouts of Medusa and vLLM."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from convert.errors import CheckpointError
from convert.from_hf import check_names, filled
from convert.heads import files as head_files
from convert.heads import medusa_config
from convert.heads.medusa_config import OWN_FILE, MedusaConfig, MedusaOrigin
from convert.json_file import read_object
from convert.keymap import HEAD, MEDUSA
from convert.safetensors_reader import Tensor, scan
from convert.weight_files import SINGLE


@dataclasses.dataclass(frozen=True)
class MedusaFiles:
    """Heads whose files have been found and checked, but whose weights have not been read yet."""

    config: MedusaConfig
    origin: MedusaOrigin
    tensors: Mapping[str, Tensor]

    def arrays(self, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (our name, array) pairs. Raise CheckpointError as in `convert.from_hf.filled`."""
        return filled(self.tensors, medusa_config.entries(self.config, self.origin), dtype)


def read(source: str | Path) -> MedusaFiles:
    """Find and check the files of Medusa heads.

    Args:
        source: a local directory or a Hugging Face repo id.

    Raises:
        CheckpointError: the files are invalid in any way. Nothing is repaired or skipped.
    """
    directory = head_files.find(source, "medusa_lm_head.pt", OWN_FILE)
    path = directory / "config.json"
    raw = read_object(path)
    single = OWN_FILE if (directory / OWN_FILE).exists() else SINGLE
    found = scan(directory, single)
    try:
        origin = medusa_config.read_origin(raw, found.keys(), single)
        if origin.prefix == MEDUSA:  # trained with the target, which is in the same files
            found = {name: tensor for name, tensor in found.items() if not name.startswith(("model.", HEAD))}
        config = medusa_config.read_sizes(raw, origin, {name: tensor.shape for name, tensor in found.items()})
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    heads, blocks = config.num_heads, config.num_blocks
    if heads * max(1, blocks) > len(found):  # a damaged config's tensor table could exhaust memory
        raise CheckpointError(
            f"{path} describes {heads} heads of {blocks} blocks each, but there are only {len(found)} "
            "tensors; restore the heads' own config.json."
        )
    table = medusa_config.entries(config, origin)
    check_names(found, {part.hf_name: entry.shape for entry in table for part in entry.parts}, directory)
    dtype = head_files.common_dtype(found)
    return MedusaFiles(config, dataclasses.replace(origin, fields=json.dumps(raw), dtype=dtype), found)


def write(
    destination: str | Path, config: MedusaConfig, arrays: Mapping[str, np.ndarray], origin: MedusaOrigin
) -> Path:
    """Atomically write Medusa head files.

    Args:
        arrays: our arrays by name, all with the same dtype.
        origin: the tensor names, and the config.json fields that `config` does not determine.

    Raises:
        CheckpointError: `destination` exists or cannot be written.
    """
    table = medusa_config.entries(config, origin)
    tensors = {part.hf_name: arrays[entry.name] for entry in table for part in entry.parts}
    fields = json.loads(origin.fields) | medusa_config.describe(config, origin)
    dtype = next(iter(tensors.values())).dtype.name
    spelled = [key for key in ("dtype", "torch_dtype") if key in fields] or ["torch_dtype"]
    return head_files.write(destination, fields | dict.fromkeys(spelled, dtype), tensors, origin.file)
