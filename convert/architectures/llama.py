"""Llama: two flags decide which projections have biases."""

from convert.architectures.base import Details, Family, within_window
from convert.json_fields import Fields, flag


def _details(raw: Fields) -> Details:
    return {
        "max_position_embeddings": within_window(raw),
        "attention_bias": flag(raw, "attention_bias"),
        "mlp_bias": flag(raw, "mlp_bias"),
    }


# In transformers, Llama's attention mask has no window, but its cache does.
LLAMA = Family("llama", "LlamaForCausalLM", _details)
