"""The same weights in transformers, with plain decoding and with assisted generation."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import jspec
from convert.config import LlamaConfig
from jspec.models.llama import widened

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate")
ROPE_FIELDS = {"default": (), "linear": ("factor",), "llama3": _LLAMA3, "yarn": _YARN}


def has_twin(model: Any) -> bool:
    """Return whether `model` is an unquantised Llama, whose weights transformers can also use."""
    return isinstance(model, jspec.Llama) and model.quantized is None


def twin(model: jspec.Llama) -> Any:
    """Return `model` in transformers, in float32 on the CPU, or in bfloat16 if there is a GPU."""
    import torch
    import transformers

    config = model.config
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    state = {name: torch.tensor(array, dtype=dtype) for name, array in hf_arrays(model).items()}
    other: Any = transformers.AutoModelForCausalLM.from_config(hf_config(config))
    other.load_state_dict(state, strict=not config.tie_word_embeddings)
    other.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return other.to(device, dtype).eval()


def hf_config(config: LlamaConfig) -> Any:
    """Return the transformers configuration that computes the same function."""
    import transformers

    family = "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"
    same = {name for name in transformers.LlamaConfig().to_dict() if hasattr(config, name)}
    sizes = {name: value for name, value in dataclasses.asdict(config).items() if name in same}
    rope = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    rope |= {name: getattr(config.rope, name) for name in ROPE_FIELDS[config.rope.kind]}
    return transformers.AutoConfig.for_model(family, **sizes, rope_parameters=rope)


def hf_arrays(model: jspec.Llama) -> dict[str, np.ndarray]:
    """Return Hugging Face name -> float32 array ``[out, in]``."""
    model = widened(model)
    config = model.config
    queries, keys = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    cuts = [queries, queries + keys]
    found = {"model.embed_tokens": model.embed_tokens, "model.norm": model.norm}
    if model.lm_head is not None:
        found["lm_head"] = model.lm_head
    arrays = {f"{name}.weight": _host(module.weight[...]) for name, module in found.items()}
    for i, layer in enumerate(model.layers):
        prefix, attention, mlp = f"model.layers.{i}.", layer.self_attn, layer.mlp
        norms = {name: getattr(layer, name) for name in ("input_layernorm", "post_attention_layernorm")}
        norms |= {f"self_attn.{name}": getattr(attention, name) for name in ("q_norm", "k_norm")}
        arrays |= {f"{prefix}{name}.weight": _host(norm.weight[...]) for name, norm in norms.items() if norm}
        for linear, parts, names in (
            (attention.qkv_proj, cuts, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (mlp.gate_up_proj, 2, ("mlp.gate_proj", "mlp.up_proj")),
            (attention.o_proj, 1, ("self_attn.o_proj",)),
            (mlp.down_proj, 1, ("mlp.down_proj",)),
        ):
            for kind, leaf in (("weight", linear.weight), ("bias", linear.bias)):
                if leaf is not None:
                    split = np.split(_host(leaf[...]), parts)
                    arrays |= {f"{prefix}{name}.{kind}": part for name, part in zip(names, split, strict=True)}
    return arrays


def _host(array: jax.Array) -> np.ndarray:
    return np.asarray(array, np.float32).T


def padded(rows: Sequence[np.ndarray], device: Any) -> tuple[Any, Any]:
    """Return ``tokens[B, P]``, left-padded as transformers expects, and the attention mask."""
    import torch

    width = max(map(len, rows))
    tokens = np.array([np.pad(row, (width - len(row), 0)) for row in rows])
    mask = np.array([np.arange(width) >= width - len(row) for row in rows])
    return torch.tensor(tokens, device=device), torch.tensor(mask, dtype=torch.long, device=device)


def greedy(
    target: Any, rows: Sequence[np.ndarray], new_tokens: int, eos_ids: Sequence[int], **options: Any
) -> tuple[list[list[int]], Any]:
    """Return the greedy continuation of every row, up to EOS or `new_tokens`, and the full result of ``generate``.

    Args:
        options: further options for ``generate``.
    """
    import torch

    tokens, mask = padded(rows, target.device)
    with torch.no_grad():
        out = target.generate(
            tokens,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new_tokens,
            eos_token_id=list(eos_ids) or None,
            return_dict_in_generate=True,
            **options,
        )
    return [to_end(text, eos_ids) for text in out.sequences[:, tokens.shape[1] :].tolist()], out


def to_end(text: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """Return `text` up to its first token of `eos_ids`."""
    ends = (i + 1 for i, token in enumerate(text) if token in eos_ids)
    return list(text[: next(ends, len(text))])


def assisted(assistant: Any, num_draft_tokens: int) -> dict[str, Any]:
    """Return options of ``generate`` for an assistant that drafts a constant number of tokens, as in jspec."""
    assistant.generation_config.num_assistant_tokens = num_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # do not stop early if the assistant is unsure
    return {"assistant_model": assistant}


def decoder(
    target: Any, assistant: Any, rows: Sequence[np.ndarray], new_tokens: int, temperature: float, num_draft_tokens: int
) -> Callable[[], Any]:
    """Return a call that continues every row of token ids by `new_tokens`.

    Plain decoding runs all rows at once. Assisted generation supports only one row, so it runs them one after another.
    """
    import torch

    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens} | sampled
    if assistant is not None:
        options |= assisted(assistant, num_draft_tokens)
    batches = [padded(some, target.device) for some in ([rows] if assistant is None else [[row] for row in rows])]

    def call() -> Any:
        with torch.no_grad():
            texts = [target.generate(tokens, attention_mask=mask, **options) for tokens, mask in batches]
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        sizes = zip(texts, batches, strict=True)
        assert all(text.shape[1] == tokens.shape[1] + new_tokens for text, (tokens, _) in sizes)
        return ()

    return call
