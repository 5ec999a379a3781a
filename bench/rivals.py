"""The same weights in transformers, decoded plainly and with its assisted generation."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import jspec


def twin(model: jspec.Llama) -> Any:
    """`model` as a transformers LlamaForCausalLM in float32 on the CPU, or in bfloat16 where there is a GPU."""
    import torch
    import transformers

    config = model.config
    same = {name for name in transformers.LlamaConfig().to_dict() if hasattr(config, name)}
    sizes = {name: value for name, value in dataclasses.asdict(config).items() if name in same}
    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    state = {name: torch.tensor(array, dtype=dtype) for name, array in hf_arrays(model).items()}
    other: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rope))
    other.load_state_dict(state, strict=not config.tie_word_embeddings)
    other.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return other.to(device, dtype).eval()


def hf_arrays(model: jspec.Llama) -> dict[str, np.ndarray]:
    """Hugging Face name -> float32 array ``[out, in]``."""
    config = model.config
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    found = {"model.embed_tokens": model.embed_tokens, "model.norm": model.norm}
    if model.lm_head is not None:
        found["lm_head"] = model.lm_head
    arrays = {f"{name}.weight": _host(module.weight[...]) for name, module in found.items()}
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{prefix}{name}.weight"] = _host(getattr(layer, name).weight[...])
        qkv = np.split(_host(layer.self_attn.qkv_proj.weight[...]), [queries, queries + keys])
        gate_up = np.split(_host(layer.mlp.gate_up_proj.weight[...]), 2)
        rest = [_host(layer.self_attn.o_proj.weight[...]), _host(layer.mlp.down_proj.weight[...])]
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
                 "self_attn.o_proj", "mlp.down_proj")  # fmt: skip
        arrays |= {f"{prefix}{name}.weight": array for name, array in zip(names, [*qkv, *gate_up, *rest], strict=True)}
    return arrays


def _host(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float32).T


def decoder(
    target: Any, assistant: Any, tokens: np.ndarray, new_tokens: int, temperature: float, num_draft_tokens: int
) -> Callable[[], Any]:
    """A call that continues every row of ``tokens[B, P]`` by `new_tokens`.

    Plain decoding takes all rows at once; assisted generation is for one row only, so the rows follow one another.
    """
    import torch

    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens} | sampled
    if assistant is not None:
        # As jspec drafts: a constant number, without stopping early where the assistant is unsure.
        assistant.generation_config.num_assistant_tokens = num_draft_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant
    rows = torch.tensor(tokens, device=target.device)
    batches = [rows] if assistant is None else list(rows[:, None])

    def call() -> Any:
        with torch.no_grad():
            texts = [target.generate(batch, attention_mask=torch.ones_like(batch), **options) for batch in batches]
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        assert all(text.shape[1] == rows.shape[1] + new_tokens for text in texts)
        return ()

    return call
