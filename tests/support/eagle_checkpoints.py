"""EAGLE-head checkpoints for the tests, written by PyTorch, with their names and fields spelled out."""

import json

import torch
from safetensors.torch import save_file

from support import toys
from support.eagle_torch import Eagle1, Eagle3, drawn

V, LAYERS = 31, 8
TARGET = toys.tiny_llama(0, LAYERS, vocab_size=V)
KNOWN = [0, 3, 4, 9, 17, 22, 29]  # the target's tokens that a reduced head can draft
LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": V,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
FLAGS = {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
# Fields that speculators and others write besides those used in the computation.
EXTRAS = {
    "speculators_version": "0.5.0",
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "embed_requires_grad": False,
    "transformers_version": "5.6.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
    },
}


def eagle3(layout, directory, dtype=torch.float32, known=KNOWN, own=("lm_head",), ids=(2, 4, 5), **changes):
    """Return a generation-3 head as ``(module, directory)``.

    Args:
        layout: "sglang" or "speculators".
        known: the tokens that the head can draft; None for all tokens.
        own: the head's own matrices, of "lm_head" and "embed_tokens".
        ids: the layers whose inputs the head reads.
        changes: changes to the flags, to the layer's fields, or to `target_hidden_size`.
    """
    count = V if known is None else len(known)
    raw = {**LLAMA, **FLAGS, "draft_vocab_size": count, "target_hidden_size": 16, "states": len(ids)} | changes
    module = drawn(Eagle3(raw))
    if "embed_tokens" not in own:
        module.embed_tokens.weight.data = torch.tensor(_rows(TARGET.embed_tokens))
    if "lm_head" not in own:
        module.lm_head.weight.data = torch.tensor(_rows(TARGET.lm_head))[slice(None) if known is None else known]
    tensors = {
        name: tensor.to(dtype)
        for name, tensor in module.state_dict().items()
        if name.split(".")[0] in own or name.split(".")[0] not in ("lm_head", "embed_tokens")
    }
    if known is not None:
        tensors["d2t"] = torch.tensor(known) - torch.arange(count)
        tensors["t2d"] = torch.isin(torch.arange(V), torch.tensor(known))
    named = {key: raw.pop(key) for key in (*FLAGS, "draft_vocab_size", "target_hidden_size")} | {
        "eagle_aux_hidden_state_layer_ids": list(ids)
    }
    raw["torch_dtype"] = str(dtype).removeprefix("torch.")
    del raw["states"]
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        fields = EXTRAS | named | {"transformer_layer_config": raw}
    else:
        section = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids], "use_aux_hidden_state": True}
        fields = {"architectures": ["LlamaForCausalLMEagle3"], **raw, **named, "eagle_config": section}
        del fields["eagle_aux_hidden_state_layer_ids"]
    return module, write(directory, fields, tensors)


def eagle1(directory, dtype=torch.float32, bias=True, own=("embed_tokens",), **changes):
    """Return a generation-1 head in its original layout, as ``(module, directory)``."""
    raw = {**LLAMA, "bias": bias, "architectures": ["LlamaForCausalLM"]} | changes
    module = drawn(Eagle1(raw))
    if "embed_tokens" not in own:
        module.embed_tokens.weight.data = torch.tensor(_rows(TARGET.embed_tokens))
    tensors = {
        name: tensor.to(dtype)
        for name, tensor in module.state_dict().items()
        if own or not name.startswith("embed_tokens")
    }
    return module, write(directory, raw | {"torch_dtype": str(dtype).removeprefix("torch.")}, tensors)


def _rows(embedding):
    return embedding.weight[...].T.__array__().copy()


def write(directory, fields, tensors, file="model.safetensors"):
    """Write a directory with these fields and tensors, and return it."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    own = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(own, directory / file, {"format": "pt"})
    return directory
