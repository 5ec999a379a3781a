"""Choose the safetensors files that hold a directory's weights, as transformers does."""

import dataclasses
from pathlib import Path
from typing import cast

from convert import other_formats
from convert.errors import CheckpointError, listing
from convert.json_file import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The weight files chosen from a directory.

    Attributes:
        files: the chosen files, sorted by name.
        weight_map: tensor name -> file name, from the index that names `files`; None for a single file.
        ignored: the names of the other safetensors files, sorted.
    """

    files: tuple[Path, ...]
    weight_map: dict[str, str] | None
    ignored: tuple[str, ...]

    @property
    def is_ambiguous(self) -> bool:
        """Whether an ignored file may be what the user wants: an adapter, or the shards of another model."""
        has_index = self.weight_map is None and (self.files[0].parent / INDEX).exists()
        return self._has_adapter or (has_index and bool(self.ignored))

    @property
    def note(self) -> str | None:
        """A sentence about the files that are read and those that are ignored, or None if none is ignored."""
        read = self.files[0].name if self.weight_map is None else f"the {len(self.files)} files of {INDEX}"
        if self._has_adapter:
            return (
                f"reading {read} and not the adapter beside it; to use the adapter, merge it with PEFT's "
                "`merge_and_unload`"
            )
        return f"reading {read} and ignoring {listing(self.ignored)}, as transformers does" if self.ignored else None

    @property
    def _has_adapter(self) -> bool:
        return _ADAPTER in self.ignored or (self.files[0].parent / _ADAPTER_CONFIG).exists()


def find(directory: Path, single: str = SINGLE) -> WeightFiles:
    """Return `single` if it exists, else the files that the index names. All of these files must exist.

    Other safetensors files are ignored, such as a second copy in another layout (consolidated.safetensors).

    Args:
        single: the name of the file that holds all weights.

    Raises:
        CheckpointError: neither `single` nor the index exists, the index is damaged, or a file that it names is
            missing. If neither exists, the message names what the directory holds instead.
    """
    present = {file.name for file in directory.glob("*.safetensors")}
    if single in present:
        return WeightFiles((directory / single,), None, tuple(sorted(present - {single})))
    if not present or not (directory / INDEX).exists():
        raise CheckpointError(other_formats.explain(directory, single, INDEX))
    weight_map = _weight_map(directory / INDEX)
    wanted = set(weight_map.values())
    if missing := wanted - present:
        raise CheckpointError(f"{directory} lacks {listing(missing)}, named by {INDEX}; download the checkpoint again.")
    return WeightFiles(tuple(directory / name for name in sorted(wanted)), weight_map, tuple(sorted(present - wanted)))


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_object(path).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    # A shard name with a slash could point outside the directory.
    if not weight_map or not all(
        isinstance(n, str) and n.endswith(".safetensors") and Path(n).name == n for n in names
    ):
        raise CheckpointError(
            f"{path} has no usable weight_map; expected a map from tensor names to the names of *.safetensors "
            "files beside it: download it again."
        )
    return cast("dict[str, str]", weight_map)
