"""Small Hugging Face checkpoints for the tests, made without `convert`: by hand, or by transformers.

`raw_config` returns the content of a config.json. `tensors` returns random weights for it; names and shapes are written
out here a second time, on purpose. `write` saves both to disk. `torch_model` returns the same model in transformers.
"""

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_RAW = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "vocab_size": 97,
}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False, "head_dim": 16}
# Every feature of the model families, one or two at a time.
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "mqa_tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True, "tie_word_embeddings": True},
    "wide_heads": {"head_dim": 16},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "llama3_rope": {"rope_parameters": LLAMA3_ROPE, "eos_token_id": [2, 5]},
    "mistral": MISTRAL,
    "qwen2_tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen3": QWEN3,
    "qwen3_bias": QWEN3 | {"attention_bias": True, "tie_word_embeddings": True},
}


def raw_config(**changes: Any) -> dict[str, Any]:
    """Return a config.json's content with some fields replaced; the value `...` removes a field."""
    raw = copy.deepcopy(_RAW) | changes
    return {key: value for key, value in raw.items() if value is not ...}


def hf_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each Hugging Face tensor by name, written out independently of the table under test."""
    hidden, inner, head = raw["hidden_size"], raw["intermediate_size"], raw["head_dim"]
    query, key = raw["num_attention_heads"] * head, raw["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (raw["vocab_size"], hidden)}
    for i in range(raw["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if raw["model_type"] == "qwen3":
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (head,)
        for name, rows, columns in (
            ("q", query, hidden),
            ("k", key, hidden),
            ("v", key, hidden),
            ("o", hidden, query),
        ):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, columns)
            if raw["attention_bias"] or (raw["model_type"] == "qwen2" and name != "o"):
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (rows,)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            shapes[f"{layer}mlp.{name}_proj.weight"] = (rows, columns)
            if raw["mlp_bias"]:
                shapes[f"{layer}mlp.{name}_proj.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not raw["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (raw["vocab_size"], hidden)
    return shapes


def tensors(raw: dict[str, Any], dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Return random weights for a config."""
    rng = np.random.default_rng(seed)
    shapes = hf_shapes(raw)
    return {name: (0.1 * rng.standard_normal(shape, np.float32)).astype(dtype) for name, shape in shapes.items()}


def write(directory: Path, raw: dict[str, Any], weights: dict[str, np.ndarray], shards: int = 1) -> Path:
    """Write config.json, tokenizer files and the weights in `shards` files, as transformers would."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    ends = json.dumps({"eos_token_id": raw.get("eos_token_id")})
    (directory / "generation_config.json").write_text(f"{ends}\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 128}\n', encoding="utf-8")
    (directory / "tokenizer.model").write_bytes(bytes(range(256)))
    (directory / "README.md").write_text("not carried along\n", encoding="utf-8")
    if shards == 1:
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        return directory
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        save_file({n: weights[n] for n in weights if weight_map[n] == file}, directory / file, {"format": "pt"})
    size = {
        "total_parameters": sum(w.size for w in weights.values()),
        "total_size": sum(w.nbytes for w in weights.values()),
    }
    index = {"metadata": size, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return directory


def make(directory: Path, dtype: Any = np.float32, shards: int = 1, seed: int = 0, **changes: Any) -> Path:
    """Write a random checkpoint with some config fields changed."""
    raw = raw_config(**changes)
    return write(directory, raw, tensors(raw, dtype, seed), shards)


def torch_model(seed: int = 0, **changes: Any) -> Any:
    """Return the transformers model for `raw_config(**changes)`, in float32, with spread-out weights.

    The default initialization has zero biases and unit norms, which would hide swapped or forgotten ones.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw_config(**changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def save_torch(directory: Path, seed: int = 0, **changes: Any) -> Any:
    """Save `torch_model(...)` to `directory` with transformers' own writer, and return it."""
    model = torch_model(seed, **changes)
    model.save_pretrained(directory)
    return model


BFLOAT16 = ml_dtypes.bfloat16
