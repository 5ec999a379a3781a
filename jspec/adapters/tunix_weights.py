"""Weights and configurations of tunix models, under their Hugging Face names."""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.config import LlamaConfig
from convert.errors import listing
from convert.rope import RopeConfig
from jspec.core.types import PyTree
from jspec.models.live_weights import leaves_by_name, load_weights, write
from jspec.models.llama import Llama, stored_orders

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_OUTSIDE = {
    "embedder.input_embedding": "model.embed_tokens.weight",
    "final_norm.w": "model.norm.weight",
    "lm_head.w": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.w": "input_layernorm.weight",
    "post_attention_layernorm.w": "post_attention_layernorm.weight",
    **{f"attn.{part}_norm.w": f"self_attn.{part}_norm.weight" for part in "qk"},
    **{f"attn.{part}_proj.w": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"attn.{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{f"mlp.{part}_proj.kernel": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
# The base of the rotary frequencies, given the config. The Llama3 and Qwen3 modules of tunix 0.1.7 ignore `rope_theta`.
_THETA: dict[str, Callable[[Any], float]] = {
    "Llama3": lambda config: 1e6,
    "Qwen2": lambda config: config.rope_theta,
    "Qwen3": lambda config: 1e6,
}
_MAX_POSITIONS = 131_072  # tunix models have no limit


def llama_from_tunix(module: nnx.Module, dtype: jnp.dtype | None = None, max_positions: int = _MAX_POSITIONS) -> Llama:
    """Return a `jspec.Llama` that computes the same function as a tunix module, with a copy of its weights.

    Args:
        module: a ``Llama3``, ``Qwen2`` or ``Qwen3`` of tunix 0.1.7.
        dtype: the dtype of the model. The default is that of the module's final norm.
        max_positions: the maximum sequence length of the model.

    Raises:
        ValueError: the module is of another class, or has weights that jspec does not know, such as those of experts or
            LoRA adapters.
    """
    kind = next((base.__name__ for base in type(module).__mro__ if base.__name__ in _THETA), None)
    if kind is None:
        raise ValueError(f"The model is a {type(module).__name__}; pass one of tunix's {', '.join(_THETA)}.")
    arrays, config = hugging_face_weights(nnx.state(module, nnx.Param)), cast("Any", module).config
    attention = "model.layers.0.self_attn."
    model = Llama(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.embed_dim,
            intermediate_size=config.hidden_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings="lm_head.weight" not in arrays,
            attention_bias=False,
            mlp_bias=False,
            rope=RopeConfig(theta=float(_THETA[kind](config))),
            bos_token_id=None,
            eos_token_ids=(),
            qkv_bias=f"{attention}q_proj.bias" in arrays,
            qk_norm=f"{attention}q_norm.weight" in arrays,
        ),
        dtype or arrays["model.norm.weight"].dtype,
        rngs=nnx.Rngs(0),
    )
    load_weights(model, arrays)
    return model


def replace_weights(model: Llama, params: PyTree, orders: Mapping[str, np.ndarray]) -> None:
    """Replace all weights of `model` in place, with those of a tunix module or of another `jspec.Llama`.

    Args:
        model: the model to update. Its weights keep their dtypes, devices and quantization.
        params: the state of the trained module.
        orders: `jspec.models.llama.stored_orders` of a trained `jspec.Llama`; empty for other modules.

    Raises:
        ValueError: names are missing or unknown, or a weight does not fit. See `jspec.load_weights`.
    """
    arrays, leaves = _by_path(params), leaves_by_name(model)
    if arrays.keys() != leaves.keys():
        return load_weights(model, hugging_face_weights(params))
    if wrong := [name for name, array in arrays.items() if array.shape != leaves[name][...].shape]:
        raise ValueError(f"The weights have unexpected shapes: {listing(wrong)}; pass the same model's weights.")
    own_orders = stored_orders(model)
    for name, array in arrays.items():
        array = jnp.array(array, copy=True)  # the trainer may donate its own array
        side_by_side = np.arange(array.shape[-1])
        own_order, order = own_orders.get(name, side_by_side), orders.get(name, side_by_side)
        if not np.array_equal(own_order, order):  # on the host, because an array's sharding may forbid indexing
            array = jnp.asarray(np.asarray(array)[..., np.argsort(order)[own_order]])
        write(leaves[name], array, name)
    return None


def hugging_face_weights(params: PyTree) -> dict[str, Array]:
    """Return the weights of a tunix ``Llama3``, ``Qwen2`` or ``Qwen3``, each ``[out, in]``, by Hugging Face name.

    Raises:
        ValueError: a name is unknown.
    """
    arrays = _by_path(params)
    names = {path: _hugging_face_name(path) for path in arrays}
    if unknown := [path for path, name in names.items() if name is None]:
        raise ValueError(
            f"The parameters include {listing(unknown)}, which jspec does not know; pass all weights of a Llama3, "
            "Qwen2 or Qwen3 without experts, and with its LoRA adapters merged."
        )
    return {name: _out_in(name, arrays[path]) for path, name in names.items() if name is not None}


def _hugging_face_name(path: str) -> str | None:
    found = _LAYER.fullmatch(path)
    if found is None:
        return _OUTSIDE.get(path)
    name = _IN_LAYER.get(found[2])
    return None if name is None else f"model.layers.{found[1]}.{name}"


def _out_in(name: str, array: Array) -> Array:
    """Return tunix's ``[in, out]``, ``[in, heads, size]`` or ``[heads, size, out]`` as ``[out, in]``."""
    if array.ndim == 1 or name == "model.embed_tokens.weight":
        return array
    return (array.reshape(-1, array.shape[-1]) if ".o_proj." in name else array.reshape(array.shape[0], -1)).T


def _by_path(params: PyTree) -> dict[str, Array]:
    """Return the arrays of a state by their dotted paths."""
    flat = cast("list[tuple[tuple[object, ...], nnx.Variable[Array] | Array]]", nnx.to_flat_state(params))
    return {".".join(map(str, path)): leaf[...] if isinstance(leaf, nnx.Variable) else leaf for path, leaf in flat}
