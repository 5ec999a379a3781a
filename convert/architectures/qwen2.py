"""Qwen2 and Qwen2.5: biases on q, k and v only. A flag enables a sliding window in some layers."""

from convert.architectures.base import Details, Family, positions, within_window
from convert.json_fields import Fields, flag, integer

_FIRST_WINDOW = 28  # the default in transformers
DEFAULTS: Fields = {"num_key_value_heads": 32, "sliding_window": 4096}


def context(raw: Fields) -> int:
    """Return `positions`, or the window if it is shorter and a layer uses it.

    The window applies to the layers from number `max_window_layers` onwards.
    """
    is_on = flag(raw, "use_sliding_window") and raw.get("layer_types") is None
    first = 0 if raw.get("max_window_layers") == 0 else integer(raw, "max_window_layers", _FIRST_WINDOW)
    return within_window(raw) if is_on and first < integer(raw, "num_hidden_layers") else positions(raw)


def _details(raw: Fields) -> Details:
    return {"max_position_embeddings": context(raw), "qkv_bias": True}


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _details, DEFAULTS, fixed={"use_mrope": False})
