"""EAGLE heads: a layer that predicts the target's next tokens from the target's hidden states.

The layer reads each token's embedding together with the target's states at the previous token. The layer's output at a
token therefore predicts the next token. The papers are Li et al. 2024, "EAGLE", section 3 (generation 1, whose weights
EAGLE-2 also uses), and Li et al. 2025, "EAGLE-3", section 3 (generation 3). The optional flags of generation 3 are
those that published checkpoints use.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array

from convert.config import LlamaConfig
from convert.heads.eagle.config import EagleConfig, EagleOrigin
from jspec.core.tree import Branches
from jspec.drafters.draft_vocabulary import spread_logits, target_ids_of
from jspec.models.attention import Attention, AttentionContext
from jspec.models.kv_cache import KVCache, empty_cache
from jspec.models.layers import MLP, Embed, Linear, RMSNorm
from jspec.models.llama import Llama
from jspec.models.rope import rope_tables


class Eagle(nnx.Module):
    """An EAGLE head. It is a pytree, like `jspec.Llama`.

    Args:
        config: the head's sizes and flags.
        dtype: the dtype of weights, activations and cache.
        rngs: the source of random initial weights.

    Attributes:
        origin: a description of the files that the head was loaded from; None if it was not loaded.
        quantized: the kind to which `jspec.EagleDrafter.quantize` quantised the matrices; None if not quantised.
    """

    def __init__(self, config: EagleConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        self.config, layer = config, config.layer
        self.origin: EagleOrigin | None = None
        self.quantized: str | None = None
        size, target_size = layer.hidden_size, config.target_hidden_size
        first = config.generation == 1
        read = 2 * size if first else len(config.features) * target_size

        def norm(size: int, wanted: bool) -> RMSNorm | None:
            return RMSNorm(size, layer.rms_norm_eps, dtype) if wanted else None

        self.input_norm = norm(read, config.norm_before_fc)
        several = len(config.features) if config.fc_norm else 0
        self.fc_norm = nnx.List([RMSNorm(target_size, layer.rms_norm_eps, dtype) for _ in range(several)])
        self.fc = Linear(read, size, config.fc_bias, dtype, rngs)
        self.input_layernorm, self.hidden_norm = norm(size, not first), norm(size, not first)
        self.self_attn = Attention(layer, dtype, rngs)
        if not first:
            bias = self.self_attn.qkv_proj.bias is not None
            self.self_attn.qkv_proj = Linear(2 * size, sum(_widths(layer)), bias, dtype, rngs)
        self.post_attention_layernorm = RMSNorm(size, layer.rms_norm_eps, dtype)
        self.mlp = MLP(layer, dtype, rngs)
        self.norm = norm(size, not first)
        self.embed_tokens = Embed(layer.vocab_size, size, dtype, rngs) if config.own_embedding else None
        vocab = config.draft_vocab_size or layer.vocab_size
        self.lm_head = Embed(vocab, size, dtype, rngs) if config.own_head else None
        # Maps each target token that the head can draft to its index among these tokens, and all other tokens to D.
        known = None if config.draft_vocab_size is None else jnp.minimum(jnp.arange(layer.vocab_size), vocab)
        self.draft_ids = None if known is None else nnx.Variable(known)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and cache."""
        return self.post_attention_layernorm.weight.dtype

    @property
    def target_ids(self) -> Array | None:
        """The target ids ``int32[D]`` of the tokens that the head can draft, in the head's order; None for all."""
        return None if self.draft_ids is None else target_ids_of(self.draft_ids[...], self.config.draft_vocab_size)

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """Return an empty cache with `slots` positions for each of `batch` rows."""
        layer = self.config.layer
        return empty_cache(1, (batch, layer.num_key_value_heads, slots, layer.head_dim), self.dtype)

    def embed(self, tokens: Array, target: Llama) -> Array:
        """Return the embeddings ``[B, S, E]`` of ``tokens int32[B, S]``, from the head's own table or the target's."""
        return (self.embed_tokens or target.embed_tokens)(tokens).astype(self.dtype)

    def fuse(self, features: Array, target: Llama) -> Array:
        """Return one state ``[B, S, E]`` from the target's states ``features[B, S, F, E']``.

        In generation 1 this is the state after the target's final norm, which the head's own output imitates.
        """
        if self.config.generation == 1:
            return target.norm(features[:, :, 0]).astype(self.dtype)
        features = features.astype(self.dtype)
        if self.fc_norm:
            features = jnp.stack([norm(features[:, :, i]) for i, norm in enumerate(self.fc_norm)], axis=2)
        flat = features.reshape(*features.shape[:2], -1)
        return self.fc(flat if self.input_norm is None else self.input_norm(flat))

    def forward(
        self, embeddings: Array, states: Array, cache: KVCache, start: Array, *, branches: Branches | None = None
    ) -> tuple[Array, KVCache]:
        """Read tokens, each together with the state at the token before it.

        Args:
            embeddings: ``[B, S, E]``.
            states: ``[B, S, E]``, from `fuse` if the target has read the preceding token, otherwise from this method.
            cache, start, branches: same as in `jspec.Llama.forward`. Slot 0 holds a sequence's second token.

        Returns:
            The states ``[B, S, E]`` that predict the next tokens, for `logits` and the next `forward`; and the updated
            cache.
        """
        slots, positions = Branches.places(start, embeddings.shape[1], branches)
        layer = self.config.layer
        tables = rope_tables(positions, layer.rope, layer.head_dim)
        x, read = self.into_layer(embeddings, states)
        context = AttentionContext(cache.keys[0], cache.values[0], slots, tables, None, branches, cache.rows)
        mixed, keys, values = self.self_attn(read, context)
        return self.out_of_layer(x, mixed), KVCache((keys,), (values,), cache.rows)

    def out_of_layer(self, x: Array, mixed: Array) -> Array:
        """Compute the states that `forward` returns, from the residual stream and the attention output."""
        x = x + self.self_attn.o_proj(mixed)
        x = x + self.mlp.down_proj(self.mlp(self.post_attention_layernorm(x)))
        return self.norm(x) if self.norm is not None and self.config.norm_output else x

    def into_layer(self, embeddings: Array, states: Array) -> tuple[Array, Array]:
        """Return the residual stream and the attention input."""
        if self.input_layernorm is None or self.hidden_norm is None:
            x = self.fc(jnp.concatenate([embeddings, states], axis=-1))
            return x, x
        normed = self.hidden_norm(states)
        read = jnp.concatenate([self.input_layernorm(embeddings), normed], axis=-1)
        return normed if self.config.norm_before_residual else states, read

    def logits(self, states: Array, target: Llama) -> Array:
        """Return ``float32[B, S, V]`` for states from `forward`, with -inf for tokens that the head cannot draft."""
        found = self.draft_logits(states, target)
        if self.draft_ids is None:
            return found
        return spread_logits(found, self.draft_ids[...])

    def draft_logits(self, states: Array, target: Llama) -> Array:
        """Return the logits of the tokens that the head can draft, ``float32[B, S, D]``."""
        if self.norm is not None and not self.config.norm_output:
            states = self.norm(states)
        return (self.lm_head or target.head).logits(states)


def _widths(layer: LlamaConfig) -> tuple[int, int, int]:
    """Return the widths of queries, keys and values."""
    size = layer.head_dim
    return layer.num_attention_heads * size, layer.num_key_value_heads * size, layer.num_key_value_heads * size


def check_target_of(config: EagleConfig, target: Llama) -> None:
    """Raise ValueError unless a head with this `config` was made for a target with these sizes."""
    sizes = target.config
    wants = [
        ("hidden size", config.target_hidden_size, sizes.hidden_size),
        ("vocabulary", config.layer.vocab_size, sizes.vocab_size),
    ]
    if not config.own_embedding or not config.own_head:
        wants.append(("embedding width", config.layer.hidden_size, sizes.hidden_size))
    for name, own, found in wants:
        if own != found:
            raise ValueError(
                f"The EAGLE head was made for a target whose {name} is {own}, but this target's is {found}; use "
                "the head that was trained for this target."
            )
    if max(config.features) > sizes.num_hidden_layers:
        raise ValueError(
            f"The EAGLE head reads the input of layer {max(config.features)}, but this target has only "
            f"{sizes.num_hidden_layers} layers; use the head that was trained for this target."
        )
