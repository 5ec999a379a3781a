"""Helpers for the tests of `convert.load` and others."""

import numpy as np


def join(weights: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
    return np.concatenate([weights[name] for name in names])


def expected_params(weights: dict[str, np.ndarray], raw: dict) -> dict[str, np.ndarray]:
    """Return jspec's arrays from Hugging Face's, spelled out independently of the table under test."""
    params = {
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "norm.weight": weights["model.norm.weight"],
    }
    if not raw["tie_word_embeddings"]:
        params["lm_head.weight"] = weights["lm_head.weight"]
    for i in range(raw["num_hidden_layers"]):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for same in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            params[ours + same] = weights[theirs + same]
        if raw["model_type"] == "qwen3":
            for same in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                params[ours + same] = weights[theirs + same]
        for kind in ("weight", "bias"):
            if kind == "weight" or raw["attention_bias"] or raw["model_type"] == "qwen2":
                qkv = [f"{theirs}self_attn.{x}_proj.{kind}" for x in "qkv"]
                params[f"{ours}self_attn.qkv_proj.{kind}"] = join(weights, qkv)
            if kind == "weight" or raw["attention_bias"]:
                params[f"{ours}self_attn.o_proj.{kind}"] = weights[f"{theirs}self_attn.o_proj.{kind}"]
            if kind == "weight" or raw["mlp_bias"]:
                gate_up = [f"{theirs}mlp.{x}_proj.{kind}" for x in ("gate", "up")]
                params[f"{ours}mlp.gate_up_proj.{kind}"] = join(weights, gate_up)
                params[f"{ours}mlp.down_proj.{kind}"] = weights[f"{theirs}mlp.down_proj.{kind}"]
    return params


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype, name
        assert actual[name].shape == array.shape, name
        assert actual[name].tobytes() == array.tobytes(), name
