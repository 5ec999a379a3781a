"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, or the same tensors in memory."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from convert import keymap
from convert.config import LlamaConfig
from convert.errors import CheckpointError, listing
from convert.json_fields import Fields, flag, integer, number
from convert.json_file import Json, read_object
from convert.safetensors_reader import scan
from convert.source import resolve

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
# Fields that change nothing in how an adapter is merged. The tensors themselves show which modules it changes.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
    *("loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size"),
    *("revision", "target_modules", "task_type"),
}
_UNSET: tuple[Json, ...] = None, False, [], {}
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"}


class Matrix(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Sequence[int]: ...


_M = TypeVar("_M", bound=Matrix, covariant=True)


@dataclasses.dataclass(frozen=True)
class LoraUpdate(Generic[_M]):
    """The change ``scale B A`` of one matrix.

    Attributes:
        a: ``[r, in]``.
        b: ``[out, r]``.
    """

    a: _M
    b: _M
    scale: float


@dataclasses.dataclass(frozen=True)
class _Scaling:
    """The fields of an adapter's configuration that determine the scale of each change."""

    alpha: float
    use_rslora: bool = False
    alpha_pattern: Mapping[str, Json] = dataclasses.field(default_factory=dict[str, Json])

    def scale(self, module: str, rank: int) -> float:
        """Return alpha over the rank, or over its square root (Kalajdzievski 2023, rsLoRA)."""
        keys = [key for key in self.alpha_pattern if re.fullmatch(rf"(.*\.)?({key})", module)]
        alpha = number(dict(self.alpha_pattern), keys[0]) if keys else self.alpha
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter(source: str | Path, config: LlamaConfig) -> dict[str, LoraUpdate[np.ndarray]]:
    """Return the adapter in a directory or Hugging Face repo, by the Hugging Face name of each matrix that it changes.

    Raises:
        CheckpointError: the files are missing or damaged, the adapter needs more than LoRA, or it belongs to a model
            of another configuration.
    """
    directory = resolve(source)
    missing = [name for name in (CONFIG, WEIGHTS) if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {listing(missing)}; pass the folder of a LoRA adapter, as PEFT's save_pretrained "
            "writes it."
        )
    scaling = _scaling(read_object(directory / CONFIG))
    arrays = {name: tensor.read_part(...) for name, tensor in scan(directory, WEIGHTS).items()}
    return _paired(arrays, scaling, config, str(directory))


def parse_adapter(arrays: Mapping[str, _M], alpha: float, config: LlamaConfig) -> dict[str, LoraUpdate[_M]]:
    """Return the adapter with these tensors, keyed like the result of `read_adapter`.

    Args:
        arrays: the tensors by PEFT's names.
        alpha: the numerator of the scale.

    Raises:
        CheckpointError: under the same conditions as `read_adapter`.
    """
    return _paired(arrays, _Scaling(alpha), config, "The adapter")


def _scaling(raw: Fields) -> _Scaling:
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f"{CONFIG} says peft_type {raw.get('peft_type')!r}; only LORA adapters can be merged.")
    if raw.get("bias", "none") != "none":
        raise CheckpointError(f"{CONFIG} says bias {raw['bias']!r}; only adapters without biases can be merged.")
    if others := [name for name, value in raw.items() if name not in _READ | _HARMLESS and value not in _UNSET]:
        raise CheckpointError(
            f"{CONFIG} sets {listing(others)}, which jspec does not support; merge the adapter with PEFT's "
            "`merge_and_unload`."
        )
    _ = integer(raw, "r")
    patterns = raw.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"alpha_pattern is {patterns!r}; expected an object.")
    return _Scaling(number(raw, "lora_alpha"), flag(raw, "use_rslora"), patterns)


def _paired(arrays: Mapping[str, _M], scaling: _Scaling, config: LlamaConfig, source: str) -> dict[str, LoraUpdate[_M]]:
    """Return the pairs of tensors, after checking their names and shapes."""
    expected = {name: shape for name, shape in keymap.hf_shapes(config).items() if len(shape) == 2}
    sides: dict[str, dict[str, _M]] = {}
    unknown: list[str] = []
    for name, array in arrays.items():
        found = _NAME.fullmatch(name)
        if found is None or f"{found['module']}.weight" not in expected or found["module"].endswith("embed_tokens"):
            unknown.append(name)
        else:
            sides.setdefault(found["module"], {})[found["side"]] = array
    if unknown or not arrays:
        raise CheckpointError(
            f"{source} has {listing(unknown) or 'no tensors'}, which cannot be merged into this model; pass a LoRA "
            "adapter of a model with the same configuration."
        )
    if single := [module for module, pair in sides.items() if len(pair) == 1]:
        raise CheckpointError(f"{source} lacks lora_A or lora_B of {listing(single)}; pass the whole adapter.")
    updates: dict[str, LoraUpdate[_M]] = {}
    for module, pair in sides.items():
        rank = _rank(module, pair["A"], pair["B"], expected[f"{module}.weight"])
        updates[f"{module}.weight"] = LoraUpdate(pair["A"], pair["B"], scaling.scale(module, rank))
    return updates


def _rank(module: str, a: Matrix, b: Matrix, shape: tuple[int, ...]) -> int:
    """Return r, after checking that ``a[r, in]`` and ``b[out, r]`` fit a matrix of `shape`, ``(out, in)``."""
    a_shape, b_shape = (tuple(array.shape) for array in (a, b))
    if len(a_shape) != 2 or len(b_shape) != 2 or (b_shape[0], a_shape[1]) != shape or a_shape[0] != b_shape[1]:
        raise CheckpointError(
            f"lora_A and lora_B of {module} have shapes {list(a_shape)} and {list(b_shape)}, but the model's matrix "
            f"has shape {list(shape)}; pass an adapter of this model."
        )
    return a_shape[0]
