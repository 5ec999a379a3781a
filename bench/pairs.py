"""The models to measure: the bundled pair, stretched pairs, and Llama shapes with random weights.

A stretched pair is a random draft and a target that starts with the same layers. The output of the target's remaining
layers to the residual stream is scaled down, so that the two models agree as often as desired. Every byte is still
read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jspec
from convert.config import LlamaConfig, RopeConfig
from convert.heads.block.config import BlockConfig, MarkovConfig


def llama(
    *, vocab: int, hidden: int, inner: int, layers: int, heads: int, groups: int, size: int, tied: bool = True
) -> LlamaConfig:
    """Return the configuration of a Llama with these sizes. `size` is the head size."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        max_position_embeddings=1 << 17,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(),
        bos_token_id=None,
        eos_token_ids=(),
    )


@dataclasses.dataclass(frozen=True)
class Stretched:
    """A stretched pair. `write_scale` sets the acceptance rate, about 0.88 at temperature 1 (`python -m bench gap`)."""

    config: LlamaConfig
    draft_layers: int
    write_scale: float


SHAPES = {
    "109m": llama(vocab=16000, hidden=768, inner=1664, layers=18, heads=12, groups=4, size=64),
    "llama-3.2-1b": llama(vocab=128256, hidden=2048, inner=8192, layers=16, heads=32, groups=8, size=64),
    "llama-3.2-3b": llama(vocab=128256, hidden=3072, inner=8192, layers=28, heads=24, groups=8, size=128),
    "llama-3.1-8b": llama(vocab=128256, hidden=4096, inner=14336, layers=32, heads=32, groups=8, size=128, tied=False),
    "qwen3-8b": dataclasses.replace(
        llama(vocab=151936, hidden=4096, inner=12288, layers=36, heads=32, groups=8, size=128, tied=False),
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        qk_norm=True,
        rope=RopeConfig(theta=1e6),
    ),
    "llama-3.3-70b": llama(vocab=128256, hidden=8192, inner=28672, layers=80, heads=64, groups=8, size=128, tied=False),
}


def dspark(target: LlamaConfig, num_layers: int = 5) -> BlockConfig:
    """Return the configuration of DSpark's drafters (deepseek-ai/DeepSpec, `config/dspark`) for `target`."""
    return BlockConfig(
        body=dataclasses.replace(target, num_hidden_layers=num_layers, tie_word_embeddings=False, qk_norm=True),
        target_hidden_size=target.hidden_size,
        features=tuple(
            round(max(0, min(i, target.num_hidden_layers))) for i in np.linspace(2, target.num_hidden_layers - 2, 5)
        ),
        block_size=7,
        mask_id=target.vocab_size - 1,
        drafts_from_first=True,
        markov=MarkovConfig("vanilla", 256),
        confidence="state and token",
        own_embedding=True,
        own_head=True,
    )


DSPARK = "dspark"  # the draft in a pair's name
STRETCHED = {"109m": Stretched(SHAPES["109m"], 2, 0.06)}
# The final norm is scaled by this factor, which makes the distributions about as peaked as a trained model's.
_PEAK = 6.0


@nnx.jit(static_argnums=(0, 1, 2))
def _initial(config: LlamaConfig, dtype: Any, seed: int) -> jspec.Llama:
    return jspec.Llama(config, dtype, rngs=nnx.Rngs(seed))


def random_llama(config: LlamaConfig, dtype: Any, seed: int = 0) -> jspec.Llama:
    """Return a Llama with random weights, generated on the device."""
    model = _initial(config, dtype, seed)
    model.norm.weight[...] = model.norm.weight[...] * _PEAK
    return model


def stretched(pair: Stretched, dtype: Any, write_scale: float | None = None) -> tuple[jspec.Llama, jspec.Llama]:
    """Return the target and draft of a stretched pair. They share no memory."""
    scale = pair.write_scale if write_scale is None else write_scale
    target = random_llama(pair.config, dtype)
    for layer in target.layers[pair.draft_layers :]:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.weight[...] = linear.weight[...] * jnp.asarray(scale, dtype)
    draft = random_llama(dataclasses.replace(pair.config, num_hidden_layers=pair.draft_layers), dtype)
    kept = {path: leaf for path, leaf in nnx.to_flat_state(nnx.state(target))}
    for path, leaf in nnx.to_flat_state(nnx.state(draft)):
        leaf.set_value(jnp.copy(kept[path][...]))
        nnx.update(draft, nnx.from_flat_state([(path, leaf)]))
    return target, draft


def with_idle_neurons(model: jspec.Llama, count: int) -> jspec.Llama:
    """Return `model` with `count` idle neurons added to each MLP: the same distribution at a larger model's cost."""
    wider = jax.tree.map(lambda leaf: leaf, model)
    wider.config = dataclasses.replace(model.config, intermediate_size=model.config.intermediate_size + count)
    idle = 0.02 * jax.random.normal(jax.random.key(0), (model.config.hidden_size, count), model.dtype)
    for layer in wider.layers:
        gate_up, down = layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight
        gate, up = jnp.split(gate_up[...], 2, axis=1)
        gate_up.set_value(jnp.concatenate([gate, idle, up, idle], axis=1))
        down.set_value(jnp.pad(down[...], ((0, count), (0, 0))))
    return wider


def weight_bytes(model: jspec.Llama) -> int:
    """Return the bytes of weights that one pass reads. It reads only a few columns of an untied embedding.

    The result is wrong for int8 on CPU unless it is packed: XLA widens the weights before the loop, so that each pass
    reads float32.
    """
    unread = None if model.lm_head is None else model.embed_tokens
    return nbytes(model) - nbytes(unread)


def nbytes(tree: Any) -> int:
    """Return the size of all arrays in bytes. JAX's `nbytes` would count a whole byte per int4 value."""
    return sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(tree))


def without_kinds(name: str) -> str:
    """Return the name of a pair without :int8 and :int4."""
    return "/".join(part.partition(":")[0] for part in name.split("/"))


def quantization_kinds(name: str) -> tuple[str | None, str | None]:
    """Return how to quantise the target and the draft of the pair `name`: "int8", "int4" or None each.

    Raises:
        ValueError: a kind is unknown.
    """
    found = [part.partition(":")[2] or None for part in name.split("/")]
    if any(kind not in (None, "int8", "int4") for kind in found):
        raise ValueError(f"{name!r} has an unknown kind of quantisation; append :int8 or :int4.")
    return found[0] if len(found) > 1 else None, found[-1]


def _quantized(model: jspec.Llama, kind: str | None) -> jspec.Llama:
    return model if kind is None else jspec.quantize(model, kind)


def pair(name: str, dtype: Any = None) -> tuple[jspec.Llama, jspec.Llama]:
    """Return ``(target, draft)`` by name: "bundled", a stretched pair, or "TARGET/DRAFT" for two random-weight shapes.

    ":int8" or ":int4" at the end of the name quantises the draft. "TARGET:int8/DRAFT" quantises the target.
    """
    given_name, (target_kind, draft_kind) = name, quantization_kinds(name)
    name = without_kinds(name)
    if target_kind or draft_kind:
        target, draft = pair(name, dtype)
        return _quantized(target, target_kind), _quantized(draft, draft_kind)
    if name == "bundled":
        return jspec.demo_pair(dtype)[:2]
    dtype = jnp.dtype(dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16))
    if name in STRETCHED:
        return stretched(STRETCHED[name], dtype)
    names = name.split("/")
    if len(names) != 2 or any(part not in SHAPES for part in names):
        raise ValueError(
            f"There is no pair {given_name!r}; use bundled, {', '.join(STRETCHED)}, or "
            f"TARGET/DRAFT from {list(SHAPES)}."
        )
    first, second = (random_llama(SHAPES[part], dtype, seed) for seed, part in enumerate(names))
    return first, second
