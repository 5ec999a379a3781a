"""A check that a model's activations fit into float16 (limit 65,504), with a float32 pass over a probe prompt."""

from collections.abc import Iterator
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.models.attention import AttentionContext
from jspec.models.llama import DecoderLayer, Llama
from jspec.models.rope import rope_tables

LARGEST = 60_000
PROBE_TOKENS = 64
# The values that a layer computes, in order.
_NAMES = (
    "self_attn.qkv_proj's output",
    "self_attn.o_proj's output",
    "mlp.gate_up_proj's output",
    "mlp.down_proj's input",
    "mlp.down_proj's output",
    "output",
)


def check_fits_float16(model: Llama) -> None:
    """Raise ValueError if an activation exceeds `LARGEST`. The message names the activation.

    Only one layer at a time is widened to float32. Other prompts may have larger activations, so the bound leaves a
    tenth of the range as headroom. At run time, a row with non-finite logits stops and is marked in
    ``out.stats.invalid``.
    """
    for name, largest in activations(model):
        if not largest <= LARGEST:
            raise ValueError(
                f"{name} reaches {largest:,.0f} on a probe prompt, which leaves too little room below float16's "
                'limit of 65,504; load the model with dtype="float32", or "bfloat16" on a device that supports '
                "it."
            )


def activations(model: Llama) -> Iterator[tuple[str, float]]:
    """Yield, for each product and each layer output, its name and its largest magnitude on the probe prompt."""
    config = model.config
    tokens = np.linspace(0, config.vocab_size - 1, min(PROBE_TOKENS, config.max_position_embeddings)).astype(np.int32)
    slots = jnp.arange(tokens.size)[None]
    tables = rope_tables(slots, config.rope, config.head_dim)
    shape = 1, config.num_key_value_heads, tokens.size, config.head_dim
    keys, values = jnp.zeros((*shape[:2], shape[3], shape[2])), jnp.zeros(shape)
    x = model.embed_tokens(jnp.asarray(tokens)[None]).astype(jnp.float32)
    yield "embed_tokens' output", float(jnp.abs(x).max())
    for i, layer in enumerate(model.layers):
        x, found = cast(tuple[Array, list[Array]], _through(layer, x, keys, values, slots, tables))
        yield from ((f"layers.{i}.{name}", float(largest)) for name, largest in zip(_NAMES, found, strict=True))


@jax.jit
def _through(
    layer: DecoderLayer, x: Array, keys: Array, values: Array, slots: Array, tables: tuple[Array, Array]
) -> tuple[Array, list[Array]]:
    """Return a layer's output in float32, and the largest magnitude of each of `_NAMES`."""

    def widen(leaf: Array) -> Array:
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.float16 else leaf

    layer = jax.tree.map(widen, layer)
    normed = layer.input_layernorm(x)
    projected = layer.self_attn.qkv_proj(normed)
    mixed, *_ = layer.self_attn(normed, AttentionContext(keys, values, slots, tables))
    attended = layer.self_attn.o_proj(mixed)
    between = x + attended
    normed_again = layer.post_attention_layernorm(between)
    gate_up, inner = layer.mlp.gate_up_proj(normed_again), layer.mlp(normed_again)
    written = layer.mlp.down_proj(inner)
    output = between + written
    return output, [jnp.abs(value).max() for value in (projected, attended, gate_up, inner, written, output)]
