"""Parse the section that compressed-tensors writes into config.json."""

import dataclasses
import reprlib
from collections.abc import Iterator
from typing import cast

from convert.errors import CheckpointError
from convert.json_fields import Fields, flag
from convert.json_file import Json
from convert.quantized import fields
from convert.quantized.fp8 import block_grid
from convert.quantized.grid import Grid

# Format -> the number types that the format can store.
_FORMATS: dict[str, tuple[Json, ...]] = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_STRATEGIES: dict[str, tuple[Json, ...]] = {
    "int": ("tensor", "channel", "group"),
    "float": ("tensor", "channel", "block"),
}
_ACTIVATIONS = ("input_activations", "output_activations")


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The way in which a checkpoint stores its quantised matrices.

    Attributes:
        format: the name of the format in compressed-tensors.
        is_float: whether the values are float8_e4m3fn instead of integers.
        bits: the number of bits of a value.
        is_symmetric: whether all zero points are 0.
        grid: the blocks that share a scale.
        reorders: whether ``weight_g_idx`` names the group of each column.
    """

    format: str
    is_float: bool
    bits: int
    is_symmetric: bool
    grid: Grid
    reorders: bool


def parse_scheme(raw: Fields) -> Scheme:
    """Return the scheme of the weights.

    Raises:
        CheckpointError: a field is invalid or not supported, or the entries of config_groups differ.
    """
    _check_dense(raw)
    schemes = {_scheme(raw, group) for group in _groups(raw)}
    if len(schemes) > 1:
        raise CheckpointError(
            f"config_groups describes {len(schemes)} ways to store weights, but all matrices must share one; choose "
            "another checkpoint."
        )
    return schemes.pop()


def quantized_activations(raw: Fields) -> list[str]:
    """Return the names of the fields that ask for quantised activations or a quantised KV cache."""
    found = {key for group in _groups(raw) for key in _ACTIVATIONS if group.get(key) is not None}
    return sorted(found) + [key for key in ("kv_cache_scheme",) if raw.get(key) is not None]


def _check_dense(raw: Fields) -> None:
    """Reject sparse weights, and transforms that a model applies to its activations."""
    fields.absent(raw, "transform_config")
    sparsity = raw.get("sparsity_config")
    if sparsity:
        fields.one_of(_object(sparsity, "sparsity_config"), "format", ("dense",), "dense")


def _groups(raw: Fields) -> Iterator[Fields]:
    groups = _object(raw.get("config_groups"), "config_groups")
    if not groups:
        raise CheckpointError("config_groups is empty; restore the model's own config.json.")
    for name, group in groups.items():
        yield _object(group, name)


def _object(value: Json, name: str) -> Fields:
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{name} is {reprlib.repr(value)}; expected an object, as in the model's own config.json."
        )
    return value


def _scheme(raw: Fields, group: Fields) -> Scheme:
    weights = _object(group.get("weights"), "weights")
    form = cast("str", fields.one_of(group if group.get("format") else raw, "format", tuple(_FORMATS)))
    kind = cast("str", fields.one_of(weights, "type", _FORMATS[form], "int"))
    bits = cast("int", fields.one_of(weights, "num_bits", (4, 8) if kind == "int" else (8,), 8))
    symmetric = flag(weights, "symmetric", True)
    if kind == "float" and not symmetric:
        raise CheckpointError("symmetric is false for float weights, but must be true; choose another checkpoint.")
    order = weights.get("actorder")
    grid = _grid(weights, kind, form)
    reorders = order is True or (isinstance(order, str) and order.lower() in ("group", "dynamic"))
    return Scheme(form, kind == "float", bits, symmetric, grid, reorders and grid.width is not None)


def _grid(weights: Fields, kind: str, form: str) -> Grid:
    allowed = tuple(name for name in _STRATEGIES[kind] if form != "pack-quantized" or name != "tensor")
    size = None if weights.get("group_size") is None else fields.group_size(weights)
    usual = "group" if size else "channel" if weights.get("group_size") else "tensor"
    strategy = fields.one_of(weights, "strategy", allowed, usual)
    if strategy == "group" and size is None:
        raise CheckpointError("group_size is missing for the strategy 'group'; restore the model's own config.json.")
    if strategy == "block":
        return block_grid(weights, "block_structure", [])
    return {"tensor": Grid(None, None), "channel": Grid(1, None), "group": Grid(1, size)}[cast("str", strategy)]
