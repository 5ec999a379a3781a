"""The two Llama shapes, and functions that create, save and load their models."""

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

END_ID = 0
MAX_POSITIONS = 1024

TARGET = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=4, head_dim=64, intermediate_size=704)
DRAFT = TARGET | dict(num_hidden_layers=2, intermediate_size=512)


def new_model(shape: dict, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Return a randomly initialised float32 Llama with tied embeddings and two key/value heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=END_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
        **shape,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def grow(small: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a copy of `small` with `layers` layers, at least as many as before, that computes the same function.

    Copied layers come after their originals. Both of their output matrices are zero, so they add nothing to the
    residual stream until trained. A shallow model trains in a fraction of the time per token.
    """
    model = new_model(TARGET | {"num_hidden_layers": layers}, small.config.vocab_size, 0)
    model.model.embed_tokens.load_state_dict(small.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(small.model.norm.state_dict())
    sources = [index * len(small.model.layers) // layers for index in range(layers)]
    for index, layer in enumerate(model.model.layers):
        layer.load_state_dict(small.model.layers[sources[index]].state_dict())
        if index and sources[index] == sources[index - 1]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@torch.no_grad()
def cut(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a draft made of the target's embeddings and its first and last layers, cut to their heaviest neurons."""
    model = new_model(DRAFT, target.config.vocab_size, 0)
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    for layer, source in zip(model.model.layers, (target.model.layers[0], target.model.layers[-1]), strict=True):
        heaviest = source.mlp.down_proj.weight.norm(dim=0).topk(model.config.intermediate_size).indices
        weights = source.state_dict()
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            weights[name] = weights[name][heaviest]
        weights["mlp.down_proj.weight"] = weights["mlp.down_proj.weight"][:, heaviest]
        layer.load_state_dict(weights)
    return model


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write config.json, generation_config.json and bfloat16 model.safetensors into `folder`.

    Only the saved copy is rounded, not `model`, so training can continue in float32.
    """
    rounded = LlamaForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.config.dtype = torch.bfloat16
    rounded.generation_config = GenerationConfig(bos_token_id=END_ID, eos_token_id=END_ID, pad_token_id=END_ID)
    rounded.save_pretrained(folder)


def load_model(folder: Path) -> LlamaForCausalLM:
    """Load the saved weights, exactly as rounded to bfloat16, into a float32 model in evaluation mode."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
