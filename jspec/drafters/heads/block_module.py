"""Block drafters: a few layers that predict several of the target's next tokens in one pass.

The layers read a block of rows: the last token, and then mask tokens. The rows attend to each other, and to keys and
values that each layer computes from the target's hidden states at the tokens before the block. These keys and values
are cached. The block's own are written after them, and are overwritten in the next round.

There are four designs. DFlash (arXiv 2602.06036) is the basic one. DSpark (arXiv 2607.05147) adds a Markov head.
JetSpec's rows attend only to earlier rows (arXiv 2606.18394). DFlash2 (vLLM pull request 52816) adds convolutions
and a candidate selector.
"""

import itertools

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from convert.heads.block.config import BlockConfig, BlockOrigin
from jspec.drafters.draft_vocabulary import spread_logits, target_ids_of
from jspec.drafters.heads.candidate_selector import CandidateSelector
from jspec.drafters.heads.convolution import ConvolvedLayer
from jspec.drafters.heads.markov import Markov
from jspec.models.attention import AttentionContext, whole_block
from jspec.models.kv_cache import KVCache, empty_cache
from jspec.models.layers import Embed, Linear, RMSNorm
from jspec.models.llama import DecoderLayer, Llama
from jspec.models.rope import rope_tables


class Block(nnx.Module):
    """The weights of a block drafter. It is a pytree, like `jspec.Llama`.

    Args:
        config: the sizes and flags.
        dtype: the dtype of weights, activations and cache.
        rngs: the source of random initial weights.

    Attributes:
        origin: a description of the files that the block was loaded from; None if it was not loaded.
        quantized: the kind to which `jspec.BlockDrafter.quantize` quantised the matrices; None if not quantised.
    """

    def __init__(self, config: BlockConfig, dtype: jnp.dtype = jnp.float32, *, rngs: nnx.Rngs):
        self.config, body = config, config.body
        self.origin: BlockOrigin | None = None
        self.quantized: str | None = None
        size, vocab = body.hidden_size, config.draft_vocab_size or body.vocab_size
        self.fc = Linear(len(config.features) * config.target_hidden_size, size, False, dtype, rngs)
        self.hidden_norm = RMSNorm(size, body.rms_norm_eps, dtype)
        self.layers = nnx.List([_layer(config, dtype, rngs) for _ in range(body.num_hidden_layers)])
        self.norm = RMSNorm(size, body.rms_norm_eps, dtype)
        self.embed_tokens = Embed(body.vocab_size, size, dtype, rngs) if config.own_embedding else None
        self.lm_head = Embed(vocab, size, dtype, rngs) if config.own_head else None
        self.markov_head = (
            None if config.markov is None else Markov(config.markov, body.vocab_size, vocab, size, dtype, rngs=rngs)
        )
        self.candidate_selector = (
            None
            if config.dflash2 is None
            else CandidateSelector(config.dflash2, body.vocab_size, size, dtype, rngs=rngs)
        )
        vector = 0 if config.markov is None or config.confidence == "state" else config.markov.rank
        self.confidence_head = None if config.confidence is None else Linear(size + vector, 1, True, dtype, rngs)
        # Maps each target token that can be drafted to its index among these tokens, and all other tokens to D.
        reduced = None if config.draft_vocab_size is None else jnp.minimum(jnp.arange(body.vocab_size), vocab)
        self.draft_ids = None if reduced is None else nnx.Variable(reduced)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations and cache."""
        return self.norm.weight.dtype

    @property
    def target_ids(self) -> Array | None:
        """The target ids ``int32[D]`` of the tokens that the block can draft, in the head's order; None for all."""
        return None if self.draft_ids is None else target_ids_of(self.draft_ids[...], self.config.draft_vocab_size)

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """Return an empty cache with `slots` positions for each of `batch` rows."""
        body = self.config.body
        return empty_cache(body.num_hidden_layers, (batch, body.num_key_value_heads, slots, body.head_dim), self.dtype)

    def read(self, features: Array, cache: KVCache, start: Array, target: Llama) -> KVCache:
        """Store the keys and values of the target's hidden states.

        Args:
            features: ``[B, S, F, E']``, the states at the positions ``start[b]`` onward.
            cache: the cache, which holds the positions before ``start[b]``.
            start: ``int32[B]``.
            target: the target, whose final norm is applied to the output of its last layer.
        """
        states = self.fuse(features, target)
        slots, tables = self._places(start, states.shape[1])
        keys, values = list(cache.keys), list(cache.values)
        for i, layer in enumerate(self.layers):
            context = AttentionContext(keys[i], values[i], slots, tables, cache_rows=cache.rows)
            keys[i], values[i] = layer.self_attn.store(states, context)
            # Otherwise, XLA would join the layers' products into one, and copy their weights in every round.
            states, keys[i] = lax.optimization_barrier((states, keys[i]))
        return KVCache(tuple(keys), tuple(values), cache.rows)

    def fuse(self, features: Array, target: Llama) -> Array:
        """Return one state ``[B, S, E]`` from the target's states ``features[B, S, F, E']``."""
        parts = [
            target.norm(features[:, :, i]) if index == target.config.num_hidden_layers else features[:, :, i]
            for i, index in enumerate(self.config.features)
        ]
        return self.hidden_norm(self.fc(jnp.concatenate(parts, axis=-1).astype(self.dtype)))

    def forward(self, tokens: Array, cache: KVCache, start: Array, target: Llama) -> tuple[Array, KVCache]:
        """Run a block, and return the rows' states ``[B, R, E]`` after the final norm, and the cache.

        Args:
            tokens: ``int32[B, R]``, the block's tokens, at the positions ``start[b]`` onward.
            cache: the cache, which holds the positions before ``start[b]``. The next R slots are overwritten.
            start: ``int32[B]``.
            target: the target, whose embedding is used if the drafter has none.
        """
        x = (self.embed_tokens or target.embed_tokens)(tokens).astype(self.dtype)
        x = x if self.config.dflash2 is None else x * self.config.dflash2.embedding_scale
        slots, tables = self._places(start, tokens.shape[1])
        branches = None if self.config.causal else whole_block(tokens.shape[1])
        layers, keys, values = [*self.layers], list(cache.keys), list(cache.values)
        normed = layers[0].input_layernorm(x)
        for i, (layer, following) in enumerate(itertools.zip_longest(layers, layers[1:])):
            window = self.config.windows[i] if self.config.windows else None
            context = AttentionContext(keys[i], values[i], slots, tables, None, branches, cache.rows, window)
            norm = self.norm if following is None else following.input_layernorm
            x, normed, keys[i], values[i] = layer(x, normed, context, norm)
        return normed, KVCache(tuple(keys), tuple(values), cache.rows)

    def logits(self, hidden: Array, target: Llama) -> Array:
        """Return the logits ``float32[B, S, D]`` of the rows' states ``[B, S, E]``, without any correction."""
        return (self.lm_head or target.head).logits(hidden if self.lm_head else hidden.astype(target.dtype))

    def confidence(self, hidden: Array, tokens: Array) -> Array | None:
        """Return the confidence head's output ``float32[B, S]``; None without a confidence head.

        Its sigmoid estimates the probability that the row's token will be accepted: ``w [h; W1[x]] + b``, where h is
        the row's state and ``W1[x]`` is the Markov head's vector of the token before (DSpark, arXiv 2607.05147).

        Args:
            hidden: ``[B, S, E]``, the rows' states.
            tokens: ``int32[B, S]``, the tokens before the rows' tokens.
        """
        if self.confidence_head is None:
            return None
        if self.config.confidence == "state and token":
            assert self.markov_head is not None, "token vectors come from the Markov head"
            vectors = self.markov_head.markov_w1(tokens).astype(hidden.dtype)
            hidden = jnp.concatenate([hidden, vectors], axis=-1)
        return self.confidence_head(hidden)[..., 0].astype(jnp.float32)

    def spread(self, logits: Array) -> Array:
        """Return the logits ``float32[B, S, V]`` of all tokens, with -inf for those that cannot be drafted."""
        return logits if self.draft_ids is None else spread_logits(logits, self.draft_ids[...])

    def _places(self, start: Array, count: int) -> tuple[Array, tuple[Array, Array]]:
        """Return the slots ``int32[B, S]`` of `count` positions from ``start[b]`` on, and their rotations."""
        slots = start[:, None] + jnp.arange(count)[None]
        body = self.config.body
        return slots, rope_tables(slots, body.rope, body.head_dim)


def _layer(config: BlockConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> DecoderLayer:
    return DecoderLayer(config.body, dtype, rngs) if config.dflash2 is None else ConvolvedLayer(config, dtype, rngs)
