"""Quantisation of trained heads. It changes what a head drafts, but the output stays exact."""

from typing import TypeVar

from jspec.drafters.heads.block_drafter import BlockDrafter
from jspec.drafters.heads.eagle import EagleDrafter
from jspec.models.llama import Llama, all_parts
from jspec.models.packed import PackedMatrix
from jspec.models.quantize import packed_quantized_matrices

Drafter = TypeVar("Drafter")


def quantize_for(target: Llama, drafter: Drafter, kind: str | None = None) -> Drafter:
    """Return `drafter` quantised to `kind` if it is an EAGLE head or a block drafter. Return other drafters unchanged.

    `kind` defaults to int8 if the target's weights are packed in a quantised format, because an unquantised head would
    read several times as many bytes per weight as the target. For other targets, and for drafters that cannot be
    packed, None leaves the drafter unchanged. Activations are rounded as in the target.

    Raises:
        ValueError: under the same conditions as `jspec.quantize`.
    """
    packed = packed_quantized_matrices(target)
    if not isinstance(drafter, EagleDrafter | BlockDrafter) or (kind is None and not packed):
        return drafter
    found = drafter.quantize(kind or "int8", min((part.activation_bits for part in packed), default=24))
    module = found.head if isinstance(found, EagleDrafter) else found.block
    can_be_packed = all(isinstance(part, PackedMatrix) for part in all_parts(module))
    return found if kind is not None or can_be_packed else drafter
