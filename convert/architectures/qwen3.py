"""Qwen3: queries and keys are normalised per head, and config.json sets the head size. Windows work as in Qwen2."""

from convert.architectures.base import Details, Family
from convert.architectures.qwen2 import DEFAULTS, context
from convert.json_fields import Fields, flag


def _details(raw: Fields) -> Details:
    return {
        "max_position_embeddings": context(raw),
        "attention_bias": flag(raw, "attention_bias"),
        "qk_norm": True,
    }


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _details, defaults=DEFAULTS | {"head_dim": 128})
