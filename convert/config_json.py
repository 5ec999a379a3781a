"""Convert a `LlamaConfig` to the fields of a config.json."""

import dataclasses

from convert.config import LlamaConfig
from convert.json_fields import Fields
from convert.rope import RopeConfig

# The fields of RopeConfig that each kind uses, besides theta and kind.
_USED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate"),
}


def fields(config: LlamaConfig) -> Fields:
    """Return fields that `parse_config` parses back to `config`, except for q/k/v-only biases and sampling defaults."""
    ends = config.eos_token_ids
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": config.pad_token_id,
        **_rope(config.rope),
    }


def _rope(rope: RopeConfig) -> Fields:
    """Return the fields in both the transformers 5 format and the earlier one, because some programs read only one."""
    given = dataclasses.asdict(rope)
    section = {"rope_type": rope.kind} | {name: given[name] for name in _USED[rope.kind]}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else section,
        "rope_parameters": {**section, "rope_theta": rope.theta},
    }
