"""The Llama decoder as a Flax NNX module. It is a pytree, so it can be passed to `jax.jit`, sharded or closed over."""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import AbstractMesh
from jax.typing import ArrayLike

from convert import keymap
from convert.config import LlamaConfig
from jspec.core.sharding import TensorParallel, replicate_features
from jspec.core.tree import Branches
from jspec.models.attention import Attention, AttentionContext
from jspec.models.fused_projection import interleaved_order
from jspec.models.kv_cache import KVCache, empty_cache
from jspec.models.layers import MLP, Embed, Linear, RMSNorm, add_and_norm, copy_tree
from jspec.models.matrix_parts import MatrixPart, widen
from jspec.models.rope import rope_tables

Result = TypeVar("Result")
Rest = TypeVarTuple("Rest")


class DecoderLayer(nnx.Module):
    """A decoder layer: attention and MLP, each on the normed residual stream."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = Attention(config, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = MLP(config, dtype, rngs)

    def __call__(
        self, x: Array, normed: Array, context: AttentionContext, following: RMSNorm | None
    ) -> tuple[Array, Array, Array, Array]:
        """Return the residual stream and its norm, ``[B, R, E]`` each, and the layer's updated keys and values.

        Args:
            x: the residual stream.
            normed: x normed by `input_layernorm`. Each layer ends by applying the next layer's `input_layernorm`.
            context: the cache, and the tokens' places in it.
            following: the next layer's `input_layernorm`, or None to skip the norm.
        """
        mixed, keys, values = self.self_attn(normed, context)
        x, normed = add_and_norm(x, mixed, self.self_attn.o_proj, self.post_attention_layernorm)
        x, normed = add_and_norm(x, self.mlp(normed), self.mlp.down_proj, following)
        return x, normed, keys, values


@jax.jit
def _run(
    layer: DecoderLayer, x: Array, normed: Array, context: AttentionContext, following: RMSNorm | None
) -> tuple[Array, Array, Array, Array]:
    """Run `layer`, traced once for all identical layers. XLA sees the same program either way."""
    return layer(x, normed, context, following)


def _with_a_row_of_zeros(through: Callable[[Array, *Rest], Result]) -> Callable[[Array, *Rest], Result]:
    """Return a version of `through` that adds a row of zeros to the single row of x, at no extra cost on a GPU.

    XLA turns a single row into a vector. A norm then takes two kernels, and a matrix product becomes a sum over an
    elementwise product, which XLA may first write to memory.
    """
    return lambda x, *rest: through(jnp.pad(x, ((0, 0), (0, 1), (0, 0))), *rest)


class Llama(nnx.Module):
    """A LlamaForCausalLM, or a model that differs from it only in details: Mistral, Qwen2 or Qwen3.

    Args:
        config: the model's sizes and constants, from `convert.read_config`.
        dtype: the dtype of weights, activations and KV cache.
        rngs: the random source for initial weights, which follow Hugging Face's initialisation.

    Attributes:
        quantized: the kind to which `jspec.quantize` or `jspec.load` quantised the matrices; None if neither did.
        placement: the placement of the weights if it is a `jspec.tensor_parallel`, on an abstract mesh; None for any
            other placement. To use the model on other devices, load it again.
    """

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        self.config = config
        self.quantized: str | None = None
        self.placement: TensorParallel | None = None
        self.embed_tokens = Embed(config.vocab_size, config.hidden_size, dtype, rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embed(config.vocab_size, config.hidden_size, dtype, rngs)

    def __call__(self, tokens: Array) -> Array:
        """Return logits ``float32[B, S, V]`` for tokens ``int32[B, S]``, using causal attention without a cache."""
        hidden, _ = self.forward(tokens, self.new_cache(*tokens.shape), jnp.zeros(tokens.shape[0], jnp.int32))
        return self.logits(hidden)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and KV cache, which is that of the norms, because norms are never quantised."""
        return self.norm.weight.dtype

    @property
    def head(self) -> Embed:
        """The module that maps normed hidden states to logits: `lm_head`, or `embed_tokens` if the two are tied."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """Return an empty KV cache with `slots` positions for each of `batch` rows."""
        config = self.config
        shape = (batch, config.num_key_value_heads, slots, config.head_dim)
        return empty_cache(config.num_hidden_layers, shape, self.dtype)

    def forward(
        self,
        tokens: Array,
        cache: KVCache,
        start: Array,
        *,
        layers: Sequence[int] | None = None,
        past: tuple[KVCache, Array] | None = None,
        branches: Branches | None = None,
        embeddings: Array | None = None,
    ) -> tuple[Array, KVCache]:
        """Run ``tokens[B, S]`` at positions ``start[b]`` onward in each row, and store their keys and values.

        Args:
            tokens: ``int32[B, S]``.
            cache: the KV cache. It holds positions ``0 .. start[b] - 1`` of row b, or only those from ``past[1][b]`` if
                `past` is given. It may have more rows than the batch. See `jspec.models.kv_cache.KVCache`.
            start: ``int32[B]``; ``start[b] + S`` must not exceed the cache's slots.
            layers: the layers to run, in this order; None for all.
            past: a read-only cache and ``int32[B]``. The cache holds the positions before ``past[1][b]``.
            branches: the structure of a tree whose node 0 has position ``start[b]``. Node n is stored in slot
                ``start[b] + n``. None means that each token follows the previous one.
            embeddings: ``[M, E]``, where row i is the embedding of token V + i.

        Returns:
            Hidden states ``[B, S, E]`` before the final norm, and the cache.
        """
        hidden, _, cache = self.forward_with_features(
            tokens, cache, start, (), layers=layers, past=past, branches=branches, embeddings=embeddings
        )
        return hidden, cache

    def forward_with_features(
        self,
        tokens: Array,
        cache: KVCache,
        start: Array,
        features: Sequence[int],
        *,
        layers: Sequence[int] | None = None,
        past: tuple[KVCache, Array] | None = None,
        branches: Branches | None = None,
        embeddings: Array | None = None,
    ) -> tuple[Array, Array, KVCache]:
        """Run `forward` and also return hidden states between its layers.

        Args:
            features: the hidden states to return. i selects the input of layer i. The number of layers, or -1, selects
                the output of the last layer.

        Returns:
            Hidden states ``[B, S, E]``, the selected hidden states ``[B, S, F, E]``, and the cache.
        """
        slots, positions = Branches.places(start, tokens.shape[1], branches)
        tables = rope_tables(positions, self.config.rope, self.config.head_dim)
        x = replicate_features(self.embed_tokens(tokens).astype(self.dtype), self.placement)
        if embeddings is not None:
            other = jnp.take(embeddings, tokens - self.config.vocab_size, axis=0, mode="clip").astype(self.dtype)
            x = jnp.where((tokens >= self.config.vocab_size)[..., None], other, x)
        order = list(range(len(self.layers)) if layers is None else layers)

        def through(x: Array, cache: KVCache, past: tuple[KVCache, Array] | None) -> tuple[Array, Array, KVCache]:
            keys, values, normed = list(cache.keys), list(cache.values), self.layers[order[0]].input_layernorm(x)
            states: dict[int, Array] = {}
            for i, following in itertools.zip_longest(order, order[1:]):
                before = None if past is None else (past[0].keys[i], past[0].values[i], past[0].rows, past[1])
                norm = None if following is None else self.layers[following].input_layernorm
                states[i] = x
                context = AttentionContext(keys[i], values[i], slots, tables, before, branches, cache.rows)
                x, normed, keys[i], values[i] = cast(
                    tuple[Array, Array, Array, Array], _run(self.layers[i], x, normed, context, norm)
                )
            target_features = [({len(self.layers): x, -1: x} | states)[i] for i in features]
            parts = (
                jnp.stack(target_features, axis=2)
                if target_features
                else jnp.zeros((*x.shape[:2], 0, x.shape[2]), x.dtype)
            )
            count = tokens.shape[1]
            return x[:, :count], parts[:, :count], KVCache(tuple(keys), tuple(values), cache.rows)

        if not order:
            return x, jnp.zeros((*x.shape[:2], 0, x.shape[2]), x.dtype), cache
        if tokens.size != 1:
            return through(x, cache, past)
        return cast(
            tuple[Array, Array, KVCache],
            lax.platform_dependent(x, cache, past, cuda=_with_a_row_of_zeros(through), default=through),
        )

    def logits(self, hidden: Array) -> Array:
        """Return ``float32[B, S, V]`` for the hidden states of `forward`."""
        return self.head.logits(replicate_features(self.norm(hidden), self.placement))


def matrices(model: nnx.Module) -> dict[str, Linear | Embed]:
    """Return a dict that maps the name of each matrix to the module that holds it."""
    modules = ((path, module) for path, module in nnx.iter_modules(model) if isinstance(module, Linear | Embed))
    return {".".join(map(str, (*path, "weight"))): module for path, module in modules}


def all_parts(model: nnx.Module) -> list[MatrixPart]:
    """Return the parts of all packed and quantised matrices."""
    return [part for module in matrices(model).values() for part in module.parts or ()]


def set_parts(module: Linear | Embed, parts: Sequence[MatrixPart]) -> None:
    """Replace the matrix of `module` with `parts`, which hold consecutive outputs."""
    if module.parts is None:
        del module.weight
    module.parts = nnx.data(nnx.List(parts))


def set_weight(module: Linear | Embed, weight: Array) -> None:
    """Replace the matrix of `module` with the array ``weight[in, out]``."""
    module.weight = nnx.data(nnx.Param(weight))
    module.parts = nnx.static(None)


def set_placement(model: Llama, placement: TensorParallel) -> None:
    """Record the placement of the weights of `model`, without moving or reordering them.

    The columns of a fused projection are interleaved if the number of shards divides the number of key-value heads (q,
    k and v) or the intermediate size (gate and up). The caller stores them in the order of `stored_orders`.
    """
    config, num_shards = model.config, placement.num_shards
    mesh = placement.mesh
    model.placement = TensorParallel(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh, placement.axis)
    for layer in model.layers:
        layer.self_attn.qkv_proj.num_shards = 1 if config.num_key_value_heads % num_shards else num_shards
        layer.mlp.gate_up_proj.num_shards = 1 if config.intermediate_size % num_shards else num_shards


def stored_orders(model: Llama) -> dict[str, np.ndarray]:
    """Return a dict from the name of each interleaved array to the order of its outputs, as side-by-side indices."""
    owners = matrices(model)
    orders: dict[str, np.ndarray] = {}
    for entry in keymap.entries(model.config):
        if len(entry.parts) > 1:
            owner = owners[f"{entry.name.rpartition('.')[0]}.weight"]
            if isinstance(owner, Linear) and owner.num_shards > 1:
                orders[entry.name] = interleaved_order([part.rows for part in entry.parts], owner.num_shards)
    return orders


def with_outputs(model: Llama, tokens: ArrayLike) -> Llama:
    """Return a copy of `model` that computes only the logits ``[B, S, D]`` of the distinct ``tokens[D]``.

    The copy shares all weights except the output head, even if the head of `model` is its embedding.
    """
    copy = copy_tree(model)
    copy.lm_head = nnx.data(model.head.select(tokens))
    return copy


def widened(model: Llama) -> Llama:
    """Return a copy of `model` with packed and quantised matrices widened to its dtype.

    The copy shares all other weights.
    """
    model = copy_tree(model)
    for module in matrices(model).values():
        if module.parts is not None:
            set_weight(module, widen(module.parts).T.astype(model.dtype))
    return model
