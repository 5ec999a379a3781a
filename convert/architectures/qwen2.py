"""Qwen2 and Qwen2.5: biases on q, k and v and nowhere else; a window for some layers where a flag switches it on."""

from typing import Any

from convert.architectures.base import Family, positions, within_window
from convert.fields import Fields, flag

DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096}


def context(raw: Fields) -> int:
    """`positions`, or the window if it is on and shorter, whichever layers it is for."""
    return within_window(raw) if flag(raw, "use_sliding_window") else positions(raw)


def _details(raw: Fields) -> dict[str, Any]:
    return {"max_position_embeddings": context(raw), "qkv_bias": True}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _details, DEFAULTS, fixed={"use_mrope": False})
