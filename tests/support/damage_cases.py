"""The damaged checkpoints that `convert.load` must reject: base, damage, and error message."""

import json

import numpy as np

from support.checkpoints import raw_config
from support.damage import (
    FILE_FAULTS,
    INDEX,
    NORM,
    SHARD,
    Damage,
    Q,
    both,
    config,
    cut,
    delete,
    edit_json,
    edit_tensors,
    integers,
    move_tensor,
    overwrite,
    pickled,
    rename,
    replace_all,
)

CASES: dict[str, tuple[str, Damage, str]] = {
    **{
        f"{name} ({base})": (base, fault(file), message)
        for name, (fault, message) in FILE_FAULTS.items()
        for base, file in (("single", "model.safetensors"), ("sharded", SHARD))
    },
    # names, shapes, dtypes
    "missing tensor": ("single", edit_tensors("model.safetensors", lambda w: w.pop(Q)), "lacks .*q_proj"),
    "missing norm": ("single", edit_tensors("model.safetensors", lambda w: w.pop(NORM)), "lacks model.norm"),
    "missing head": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.pop("lm_head.weight")),
        "lacks lm_head",
    ),
    "unknown tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update(extra=w[NORM])),
        "unexpected extra",
    ),
    "adapter inside": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q.replace("weight", "lora_A.weight"): w[NORM]})),
        "unexpected .*lora_A",
    ),
    "unknown buffer": (
        "single",
        edit_tensors(
            "model.safetensors", lambda w: w.update({"model.layers.9.self_attn.rotary_emb.inv_freq": w[NORM]})
        ),
        "unexpected .*inv_freq",
    ),
    "unwanted bias": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q.replace("weight", "bias"): w[NORM]})),
        "unexpected .*q_proj.bias",
    ),
    "renamed tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({"norm.weight": w.pop(NORM)})),
        "lacks model.norm",
    ),
    "transposed tensor": (
        "single",
        edit_tensors(
            "model.safetensors",
            lambda w: w.update({Q.replace("q_", "k_"): np.ascontiguousarray(w[Q.replace("q_", "k_")].T)}),
        ),
        r"shape \[32, 16\], expected \[16, 32\]",
    ),
    "flattened tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q: w[Q].reshape(-1)})),
        r"has shape \[1024\]",
    ),
    "padded vocabulary": (
        "single",
        edit_tensors(
            "model.safetensors",
            lambda w: w.update({"model.embed_tokens.weight": np.zeros((128, 32), np.float32)}),
        ),
        r"has shape \[128, 32\], expected \[97, 32\]",
    ),
    "integers": (
        "single",
        edit_tensors("model.safetensors", integers),
        "is I32; expected one of F32, BF16, F16",
    ),
    "float64": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({n: a.astype(np.float64) for n, a in w.items()})),
        "is F64; expected one of",
    ),
    "one half-precision tensor": (
        "single",
        edit_tensors("model.safetensors", lambda w: w.update({Q: w[Q].astype(np.float16)})),
        "mixes dtypes",
    ),
    "no tensor at all": ("single", edit_tensors("model.safetensors", lambda w: w.clear()), "has 0 tensors"),
    "tied head differs": (
        "tied",
        edit_tensors("model.safetensors", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1})),
        "lm_head.weight differs from model.embed_tokens.weight",
    ),
    "tied head differs in the last value": (
        "tied",
        edit_tensors("model.safetensors", lambda w: w.update({"lm_head.weight": _last_changed(w)})),
        "lm_head.weight differs from",
    ),
    "tied head of another dtype differs": (
        "tied",
        edit_tensors("model.safetensors", lambda w: w.update({"lm_head.weight": _last_changed(w).astype(np.float16)})),
        "lm_head.weight differs from",
    ),
    "tied head of another shape": (
        "tied",
        edit_tensors("model.safetensors", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"][:-1]})),
        "lm_head.weight differs from",
    ),
    "tied without embedding and head": (
        "tied",
        edit_tensors("model.safetensors", lambda w: w.pop("model.embed_tokens.weight")),
        "lacks model.embed_tokens.weight",
    ),
    # shards and index
    "missing shard": ("sharded", delete(SHARD), f"lacks {SHARD}, named by {INDEX}"),
    "renamed file": ("single", rename("model.safetensors", "weights.safetensors"), f"without {INDEX}"),
    "no index": ("sharded", delete(INDEX), f"without {INDEX}; expected that index"),
    "duplicate in two shards": (
        "sharded",
        move_tensor(NORM, SHARD, "model-00003-of-00003.safetensors", keep=True),
        f"{NORM} is in model-0000",
    ),
    "tensor moved to another shard": (
        "sharded",
        move_tensor(NORM, SHARD, "model-00003-of-00003.safetensors", keep=False),
        f"disagree about {NORM}",
    ),
    "shards swapped": (
        "sharded",
        both(
            rename(SHARD, "x"),
            rename("model-00001-of-00003.safetensors", SHARD),
            rename("x", "model-00001-of-00003.safetensors"),
        ),
        "disagree about",
    ),
    "index without a key": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].pop(NORM)),
        f"disagree about {NORM}",
    ),
    "index with a key too many": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update(ghost=SHARD)),
        "disagree about ghost",
    ),
    "index with a head that is nowhere": (
        "sharded",
        both(
            *(
                edit_tensors(f"model-0000{i}-of-00003.safetensors", lambda w: w.pop("lm_head.weight", None))
                for i in (1, 2, 3)
            )
        ),
        "disagree about lm_head.weight",
    ),
    "index names another shard": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "model-00003-of-00003.safetensors"})),
        f"disagree about {NORM}",
    ),
    "index names an absent shard": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "model-00009-of-00003.safetensors"})),
        "lacks model-00009-of-00003.safetensors",
    ),
    "index leads outside": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: f"../sharded/{SHARD}"})),
        "no usable weight_map",
    ),
    "index names a pickle": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: "pytorch_model.bin"})),
        "no usable weight_map",
    ),
    "index names a number": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].update({NORM: 3})),
        "no usable weight_map",
    ),
    "index without map": ("sharded", edit_json(INDEX, lambda i: i.pop("weight_map")), "no usable weight_map"),
    "index with empty map": (
        "sharded",
        edit_json(INDEX, lambda i: i["weight_map"].clear()),
        "no usable weight_map",
    ),
    "index is a list": ("sharded", overwrite(INDEX, "[]"), "holds a JSON list instead of an object"),
    "index cut": ("sharded", cut(INDEX, 0.7), "cannot be read as JSON"),
    "index empty": ("sharded", overwrite(INDEX, ""), "cannot be read as JSON"),
    "index key twice": (
        "sharded",
        lambda d: (d / INDEX).write_text((d / INDEX).read_text().replace("{\n", '{"weight_map": {},', 1)),
        "'weight_map' appears twice",
    ),
    # config.json
    "no config": ("single", delete("config.json"), "config.json is missing"),
    "config empty": ("single", overwrite("config.json", ""), "cannot be read as JSON"),
    "config cut": ("single", cut("config.json", 0.5), "cannot be read as JSON"),
    "config is text": ("single", overwrite("config.json", '"llama"'), "holds a JSON str instead of an object"),
    "config not UTF-8": ("single", overwrite("config.json", b"\xff\xfe{}"), "cannot be read as JSON"),
    "config nested without end": (
        "single",
        overwrite("config.json", '{"a":' * 100000),
        "cannot be read as JSON",
    ),
    "config is a directory": (
        "single",
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        "config.json is missing",
    ),
    "config key twice": (
        "single",
        lambda d: (d / "config.json").write_text(json.dumps(raw_config())[:-1] + ', "head_dim": 16}'),
        "'head_dim' appears twice",
    ),
    "more layers": ("single", config(num_hidden_layers=3), r"lacks model\.layers\.2"),
    "fewer layers": ("single", config(num_hidden_layers=1), r"unexpected model\.layers\.1"),
    "a billion layers": ("single", config(num_hidden_layers=10**9), "num_hidden_layers 1000000000"),
    "another vocabulary": ("single", config(vocab_size=96), r"expected \[96, 32\]"),
    "another width": ("single", config(hidden_size=64), "has shape"),
    "another inner width": ("single", config(intermediate_size=44), "has shape"),
    "more kv heads": ("single", config(num_key_value_heads=4), "has shape"),
    "another head size": ("single", config(head_dim=16), "has shape"),
    "tied by mistake": ("single", config(tie_word_embeddings=True), "lm_head.weight differs"),
    "untied by mistake": ("tied", config(tie_word_embeddings=False), "lacks lm_head.weight"),
    "bias by mistake": ("single", config(attention_bias=True), "lacks .*bias"),
    "mlp bias by mistake": ("single", config(mlp_bias=True), "lacks .*bias"),
    "another architecture": ("single", config(model_type="qwen2"), "model_type is 'qwen2'"),
    "quantised": ("single", config(quantization_config={"quant_method": "aqlm"}), "quantization_config is"),
    "longrope": ("single", config(rope_parameters={"rope_type": "longrope"}), "'longrope' is not supported"),
    # no safetensors
    **{
        f"only {name}": ("single", pickled(name), "holds only pickle files .*convert them to safetensors")
        for name in (
            "pytorch_model.bin",
            "model.pt",
            "model.pth",
            "weights.pkl",
            "weights.pickle",
            "model.ckpt",
        )
    },
    "no weights": ("single", replace_all(lambda d: None), "holds no .*safetensors file"),
    "only an index": ("sharded", replace_all(overwrite(INDEX, "{}")), "holds no .*safetensors file"),
    "nothing": ("single", lambda d: [file.unlink() for file in d.iterdir()], "is empty"),
}


def _last_changed(weights: dict) -> np.ndarray:
    head = weights["model.embed_tokens.weight"].copy()
    head[-1, -1] += 1
    return head
