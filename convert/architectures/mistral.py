"""Mistral: no biases. Every layer uses the sliding window, if there is one."""

from convert.architectures.base import Details, Family, within_window
from convert.json_fields import Fields


def _details(raw: Fields) -> Details:
    return {"max_position_embeddings": within_window(raw)}


MISTRAL = Family("mistral", "MistralForCausalLM", _details, defaults={"num_key_value_heads": 8, "sliding_window": 4096})
