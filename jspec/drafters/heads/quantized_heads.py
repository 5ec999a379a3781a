"""Quantisation of trained heads, which draft from their own distributions, however coarse their weights are."""

from typing import TypeVar

from jspec.drafters.heads.block_drafter import BlockDrafter
from jspec.drafters.heads.eagle import EagleDrafter
from jspec.models.llama import Llama
from jspec.models.quantize import packed_codes

Drafter = TypeVar("Drafter")


def quantize_for(target: Llama, drafter: Drafter, kind: str | None = None) -> Drafter:
    """Return `drafter` quantised to `kind` if it is an EAGLE head or a block drafter. Return others unchanged.

    If `kind` is None, it is int8 if the target's weights are packed in a quantised format. Otherwise, each draft token
    would read several times more bytes per weight than the target's pass. Activations are rounded as in the target.

    Raises:
        ValueError: under the same conditions as `jspec.quantize`.
    """
    packed = packed_codes(target)
    kind = "int8" if kind is None and packed else kind
    if kind is None or not isinstance(drafter, EagleDrafter | BlockDrafter):
        return drafter
    return drafter.quantize(kind, min((part.activation_bits for part in packed), default=24))
