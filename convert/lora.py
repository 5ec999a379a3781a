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
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight")
# Other initialisations, such as PiSSA and LoftQ, also change the base model's weights.
_INITS = None, True, False, "gaussian", "eva", "orthogonal"
# Fields that do not affect the merge. The tensors themselves show which modules the adapter changes.
_IGNORED_FIELDS = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform"),
    *("lora_dropout", "megatron_core", "peft_version", "qalora_group_size"),
    *("revision", "target_modules", "task_type"),
}
_EMPTY_VALUES: tuple[Json, ...] = None, False, [], {}
_SUPPORTED_FIELDS = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights")
}


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
        try:
            keys = [key for key in self.alpha_pattern if re.fullmatch(rf"(.*\.)?({key})", module)]
        except re.error as error:
            raise CheckpointError(
                f"{CONFIG} has an alpha_pattern key that is not a regular expression ({error}); correct the key."
            ) from error
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
    return _pair_tensors(arrays, scaling, config, str(directory))


def parse_adapter(arrays: Mapping[str, _M], alpha: float, config: LlamaConfig) -> dict[str, LoraUpdate[_M]]:
    """Return the adapter with these tensors, keyed like the result of `read_adapter`.

    Args:
        arrays: the tensors by PEFT's names.
        alpha: the numerator of the scale.

    Raises:
        CheckpointError: under the same conditions as `read_adapter`.
    """
    return _pair_tensors(arrays, _Scaling(alpha), config, "The adapter")


def _scaling(raw: Fields) -> _Scaling:
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(f'{CONFIG} sets peft_type to {raw.get("peft_type")!r}; jspec can merge only "LORA".')
    if raw.get("bias", "none") != "none":
        raise CheckpointError(f"{CONFIG} sets bias to {raw['bias']!r}; jspec can merge only adapters without biases.")
    if raw.get("init_lora_weights") not in _INITS:
        raise CheckpointError(
            f"{CONFIG} sets init_lora_weights to {raw['init_lora_weights']!r}, which also changes the base model; save "
            "the adapter again with PEFT's `save_pretrained(..., path_initial_model_for_weight_conversion=...)`."
        )
    if unsupported := [
        name
        for name, value in raw.items()
        if name not in _SUPPORTED_FIELDS | _IGNORED_FIELDS and value not in _EMPTY_VALUES
    ]:
        raise CheckpointError(
            f"{CONFIG} sets {listing(unsupported)}, which jspec does not support; merge the adapter with PEFT's "
            "`merge_and_unload`."
        )
    _ = integer(raw, "r")
    patterns = raw.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{CONFIG} sets alpha_pattern to {patterns!r}; expected an object.")
    return _Scaling(number(raw, "lora_alpha"), flag(raw, "use_rslora"), patterns)


def _pair_tensors(
    arrays: Mapping[str, _M], scaling: _Scaling, config: LlamaConfig, source: str
) -> dict[str, LoraUpdate[_M]]:
    """Return the pairs of tensors, after checking their names and shapes."""
    expected = {name: shape for name, shape in keymap.hf_shapes(config).items() if len(shape) == 2}
    sides: dict[str, dict[str, _M]] = {}
    unknown: list[str] = []
    for name, array in arrays.items():
        found = _NAME.fullmatch(name)
        if found is None or f"{found['module']}.weight" not in expected or found["module"].endswith("embed_tokens"):
            unknown.append(name)
        elif found["side"] in (pair := sides.setdefault(found["module"], {})):
            raise CheckpointError(f"{source} has lora_{found['side']} of {found['module']} twice; pass one adapter.")
        else:
            pair[found["side"]] = array
    if not arrays:
        raise CheckpointError(f"{source} has no tensors; pass a LoRA adapter of a model with the same configuration.")
    if unknown:
        raise CheckpointError(
            f"{source} has {listing(unknown)}, which this model cannot merge; pass a LoRA adapter of a model with the "
            "same configuration."
        )
    if unpaired := [module for module, pair in sides.items() if len(pair) == 1]:
        raise CheckpointError(f"{source} lacks lora_A or lora_B for {listing(unpaired)}; pass the whole adapter.")
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
