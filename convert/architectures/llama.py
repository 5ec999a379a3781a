"""Llama: biases where its two flags say so."""

from typing import Any

from convert.architectures.base import Family, positions
from convert.fields import Fields, flag


def _details(raw: Fields) -> dict[str, Any]:
    return {
        "max_position_embeddings": positions(raw),
        "attention_bias": flag(raw, "attention_bias"),
        "mlp_bias": flag(raw, "mlp_bias"),
    }


# Transformers' mask for a Llama knows no window, but its cache does.
LLAMA = Family("llama", "LlamaForCausalLM", _details, fixed={"pretraining_tp": 1, "sliding_window": None})
