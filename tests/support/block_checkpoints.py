"""Block drafter checkpoints with random weights, in the layouts of several programs."""

import json

import numpy as np
from safetensors.numpy import save_file

V, E, LAYERS = 8, 16, 3  # of the target


def without(raw, *names):
    """Return `raw` without some of its fields."""
    return {name: value for name, value in raw.items() if name not in names}


BODY = {
    "model_type": "qwen3",
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "attention_bias": False,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MARKOV = {"markov_rank": 5, "enable_confidence_head": True, "confidence_head_with_markov": True}
DEEPSPEC = BODY | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 4,
    "mask_token_id": 7,
    "target_layer_ids": [0, 1],
    "num_anchors": 512,
    "num_target_layers": LAYERS,
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": BODY,
    "draft_vocab_size": 5,
    "block_size": 4,
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 7,
    "sample_from_anchor": False,
}
DSPARK = {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "sample_from_anchor": True}
DFLASH = BODY | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 5,
    "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]},
}
SIZES = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 3}
DFLASH2 = DFLASH | {"architectures": ["DFlash2DraftModel"], "is_causal": False}
DFLASH2["dflash_config"] = DFLASH["dflash_config"] | SIZES
SCALES = {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
WINDOWS = {"sliding_window": 5, "use_sliding_window": True}
SLIDING, FULL = "sliding_attention", "full_attention"
# The fields of deepseek-ai/dspark_qwen3_8b_block7, with the sizes of a tiny target.
DSPARK_BLOCK7 = {
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "bos_token_id": 151643,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "eos_token_id": 151645,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 6,
    "mask_token_id": 260,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_anchors": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "num_target_layers": 6,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [0, 1, 2, 3, 4],
    "tie_word_embeddings": False,
    "transformers_version": "5.2.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 261,
}
# Name -> the content of config.json.
CONFIGS = {
    "dflash": DFLASH,
    "dflash with biases": DFLASH | {"attention_bias": True},
    "jetspec": DFLASH | {"dflash_config": DFLASH["dflash_config"] | {"causal_head": True}},
    "deepspec dflash": DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False},
    **{f"deepspec {kind}": DEEPSPEC | MARKOV | {"markov_head_type": kind} for kind in ("vanilla", "gated", "rnn")},
    "deepspec, state only": DEEPSPEC | MARKOV | {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "speculators dflash": SPECULATORS,
    "speculators dspark": SPECULATORS | DSPARK | MARKOV | {"markov_head_type": "rnn"},
    "speculators dspark after the anchor": SPECULATORS
    | DSPARK
    | MARKOV
    | {"markov_head_type": "vanilla", "sample_from_anchor": False},
    "dflash2": DFLASH2,
    "dflash2 with windows and scales": DFLASH2
    | WINDOWS
    | {"layer_types": [SLIDING, FULL], "dflash_config": DFLASH2["dflash_config"] | SCALES},
    "dflash2 with causal windows": without(DFLASH2, "is_causal") | WINDOWS | {"layer_types": [SLIDING, SLIDING]},
    "speculators dflash2": SPECULATORS
    | SIZES
    | {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"], "draft_vocab_size": V},
}


def section(raw):
    """Return config.json with the fields of its sections at the top level."""
    return raw | raw.get("dflash_config", {}) | raw.get("transformer_layer_config", {})


def shapes(raw):
    """Return the shape of every tensor, by name."""
    flat = section(raw)
    inner, size, heads, groups = (
        flat[name] for name in ("intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    vocab, width = flat["vocab_size"], flat["hidden_size"]
    states = len(flat.get("target_layer_ids") or flat["aux_hidden_state_layer_ids"])
    found = {"fc.weight": (width, states * width), "hidden_norm.weight": (width,), "norm.weight": (width,)}
    for i in range(flat["num_hidden_layers"]):
        sizes = {
            "q": (heads * size, width),
            "k": (groups * size, width),
            "v": (groups * size, width),
            "o": (width, heads * size),
        }
        layer = {f"self_attn.{name}_proj.weight": shape for name, shape in sizes.items()}
        if flat["attention_bias"]:
            layer |= {f"self_attn.{name}_proj.bias": shape[:1] for name, shape in sizes.items()}
        layer |= {f"mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        layer |= {"mlp.down_proj.weight": (width, inner), "input_layernorm.weight": (width,)}
        layer |= {"post_attention_layernorm.weight": (width,)}
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
        if "conv_kernel_size" in flat:
            taps, channels = flat["conv_kernel_size"], flat["conv_group_size"]
            for place in ("attention_conv", "mlp_conv"):
                layer |= {f"{place}.base_kernel": (2, taps, width)}
                layer |= {f"{place}.kernel_projection.weight": (2 * taps * width // channels, width)}
        found |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    drafted = flat.get("draft_vocab_size", vocab)
    if "dflash_config" not in raw:
        found |= {"embed_tokens.weight": (vocab, width), "lm_head.weight": (drafted, width)}
    rank = flat.get("markov_rank", 0)
    if rank:
        found |= {"markov_head.markov_w1.weight": (vocab, rank), "markov_head.markov_w2.weight": (drafted, rank)}
        gate, joint = "markov_head.gate_proj.", "markov_head.joint_proj."
        found |= {
            "vanilla": {},
            "gated": {f"{gate}weight": (rank, width + rank), f"{gate}bias": (rank,)},
            "rnn": {f"{joint}weight": (3 * rank, 2 * rank + width), f"{joint}bias": (3 * rank,)},
        }[flat["markov_head_type"]]
    if "selector_rank" in flat:
        rank, selector = flat["selector_rank"], "candidate_selector."
        found |= {f"{selector}{name}_codebook": (vocab, rank) for name in ("predecessor", "successor")}
        found |= {f"{selector}hidden_projection.weight": (rank, width)}
    if flat.get("enable_confidence_head"):
        read = width + (rank if flat["confidence_head_with_markov"] else 0)
        found |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    return found


def write(folder, raw, seed=0, dtype=np.float32):
    """Write a checkpoint with random weights, and return its tensors by name."""
    rng = np.random.default_rng(seed)
    tensors = {
        name: (rng.normal(size=shape) * (shape[-1] ** -0.5 if len(shape) == 2 else 0.2) + (len(shape) == 1)).astype(
            dtype
        )
        for name, shape in shapes(raw).items()
    }
    if raw.get("draft_vocab_size", V) < V:
        tokens = np.array([1, 2, 4, 6, 7])
        known = np.zeros(V, bool)
        known[tokens] = True
        tensors |= {"d2t": tokens - np.arange(5), "t2d": known}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors
