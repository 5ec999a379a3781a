"""The merging of LoRA adapters into a model's matrices."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from convert import keymap
from convert.lora import LoraUpdate, parse_adapter, read_adapter
from jspec.models.array_layout import lay_out
from jspec.models.layers import Embed, Linear, copy_tree
from jspec.models.live_weights import Weight, as_array, check_whole_vocabulary, check_writable, write_matrix
from jspec.models.llama import Llama, matrices, stored_orders
from jspec.models.matrix_parts import widen

Adapter: TypeAlias = str | Path | Mapping[str, Weight]


def merge_lora(model: Llama, adapter: Adapter, alpha: float | None = None) -> Llama:
    """Return a copy of `model` with a LoRA adapter merged into its matrices: ``W + scale B A`` (Hu et al. 2021).

    The sum is computed in float32. Each matrix keeps its dtype and its devices, and is packed or quantised as before.
    The copy shares all other weights with `model`, which stays unchanged, so that you can merge another adapter into it
    later. To use the copy in an engine, pass it to `jspec.engine.Engine.update`.

    Args:
        model: the model that the adapter was trained for.
        adapter: a directory or Hugging Face repo id of an adapter that PEFT has saved; or its tensors by PEFT's names,
            such as "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", as PEFT's
            `get_peft_model_state_dict` returns them.
        alpha: for tensors, the `lora_alpha` of the adapter. The scale is alpha over the rank.

    Raises:
        convert.CheckpointError: the adapter belongs to a model of another configuration, is not a plain LoRA adapter,
            or is damaged.
        ValueError: `alpha` is missing, is not a positive number, or was passed with a folder; the model's vocabulary is
            reduced; a merged value does not fit the dtype; or a matrix is packed in a format that jspec cannot write.
    """
    if isinstance(adapter, Mapping) and not (isinstance(alpha, int | float) and 0 < alpha < math.inf):
        raise ValueError(f"alpha is {alpha!r}; pass the adapter's lora_alpha, a positive number, with its tensors.")
    if not isinstance(adapter, Mapping) and alpha is not None:
        raise ValueError(
            f"alpha={alpha!r} was passed with a folder, whose adapter_config.json sets it; leave out alpha."
        )
    check_whole_vocabulary(model)
    updates = (
        {name: _on_device(name, update) for name, update in parse_adapter(adapter, alpha, model.config).items()}
        if isinstance(adapter, Mapping) and alpha is not None
        else {name: _on_device(name, update) for name, update in read_adapter(str(adapter), model.config).items()}
    )
    model = copy_tree(model)
    owners = matrices(model)
    changed = [entry for entry in keymap.entries(model.config) if any(part.hf_name in updates for part in entry.parts)]
    for entry in changed:
        check_writable(owners[entry.name], entry.name)
    orders = stored_orders(model)
    for entry in changed:
        merged = _merged(owners[entry.name], entry, updates, orders.get(entry.name))
        write_matrix(owners[entry.name], merged, entry.name)
    lay_out(model)
    return model


def _on_device(name: str, update: LoraUpdate[Weight]) -> LoraUpdate[Array]:
    return LoraUpdate(as_array(name, update.a), as_array(name, update.b), update.scale)


def _merged(
    module: Linear | Embed,
    entry: keymap.Entry,
    updates: Mapping[str, LoraUpdate[Array]],
    order: np.ndarray | None,
) -> Array:
    """Return the matrix of `module` as ``float32[out, in]``, with the updates of its parts added.

    Args:
        order: the order of the matrix's outputs, from `jspec.models.llama.stored_orders`, or None.
    """
    weight = module.weight[...].T.astype(jnp.float32) if module.parts is None else widen(module.parts)
    changes = jnp.zeros(entry.shape, jnp.float32)
    first_row = 0
    for part in entry.parts:
        if part.hf_name in updates:
            update = updates[part.hf_name]
            change = jnp.matmul(update.b.astype(jnp.float32), update.a.astype(jnp.float32), precision="highest")
            changes = changes.at[first_row : first_row + part.rows].set(update.scale * change)
        first_row += part.rows
    changes = changes if order is None else changes[order]
    return weight + jax.device_put(changes, weight.sharding)
