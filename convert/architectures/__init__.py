"""The model families whose forward pass differs from Llama's only in details. Each has a module for its config.json."""

from convert.architectures.base import Family
from convert.architectures.llama import LLAMA
from convert.architectures.mistral import MISTRAL
from convert.architectures.qwen2 import QWEN2
from convert.architectures.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family"]

FAMILIES = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
