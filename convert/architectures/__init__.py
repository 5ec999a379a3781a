"""The families whose forward pass is that of a Llama but for a detail; a file each says what its config.json means."""

from convert.architectures.base import Family
from convert.architectures.llama import LLAMA
from convert.architectures.mistral import MISTRAL
from convert.architectures.qwen2 import QWEN2
from convert.architectures.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family"]

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
