"""Tiny models with known distributions: a Markov table that stands in for a Llama, and random Llamas of 8 tokens."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.config import LlamaConfig, RopeConfig
from jspec.acceptance import RULES
from jspec.core.sampling import LogitsTransforms, broadcast_rows, draft_transforms, target_transforms
from jspec.decoding.inputs import ProgramSpec, PromptBatch, TracedParams
from jspec.decoding.program import decode_program, start
from jspec.decoding.round import decode_round
from jspec.decoding.state import RequestParams
from jspec.drafters.draft_length import Fixed
from jspec.drafters.duck_length import as_draft_length
from jspec.models.kv_cache import KVCache
from jspec.models.llama import Llama

SPREAD_PARAMS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "draft_temperature"),
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class MarkovModel:
    """A language model whose next logits depend only on the last token: ``table[last]``, float32[V, V]."""

    table: Array

    @property
    def config(self):
        return types.SimpleNamespace(vocab_size=self.table.shape[-1], max_position_embeddings=1 << 20)

    def new_cache(self, batch, slots):
        return KVCache((), ())

    def forward(self, tokens, cache, start, past=None, branches=None):
        return self.table[tokens], cache

    def logits(self, hidden):
        return hidden


def markov_pair(seed, vocab_size=8, scale=1.2):
    """Return target and draft tables, independent of each other and far from uniform."""
    tables = scale * np.random.default_rng(seed).normal(size=(2, vocab_size, vocab_size))
    return tuple(MarkovModel(jnp.asarray(table, jnp.float32)) for table in tables)


def llama_config(num_layers, vocab_size=8, **details):
    """Return the config of a Llama with `vocab_size` tokens, hidden size 16, and two query heads on one key/value head.

    Args:
        details: other fields, such as qk_norm.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        rope=RopeConfig(),
        bos_token_id=None,
        eos_token_ids=(),
    )
    return dataclasses.replace(config, **details)


def tiny_llama(seed, num_layers=2, related_to=None, closeness=0.9, **details):
    """Return a random Llama with distributions far from uniform, in which context and position matter.

    Args:
        related_to: a Llama with at least as many layers, whose weights are mixed in with weight `closeness`.
    """
    model = nnx.eval_shape(lambda: Llama(llama_config(num_layers, **details), rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    known = {} if related_to is None else dict(nnx.to_flat_state(nnx.state(related_to)))
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        values = np.ones(leaf.shape) if len(leaf.shape) == 1 else rng.normal(size=leaf.shape) * leaf.shape[-1] ** -0.5
        if path[0] == "lm_head":
            values *= 1.3
        if path in known:
            values = closeness * np.asarray(known[path][...]) + (1 - closeness**2) ** 0.5 * values
        leaf.set_value(jnp.asarray(values, jnp.float32))
    return model


def both_transforms(params, batch):
    """Return both models' transforms with one entry per row and none left out, so all settings share one program."""
    return broadcast_rows(target_transforms(params), batch), broadcast_rows(draft_transforms(params), batch)


def request(keys, lengths, limit, own: LogitsTransforms, drafts: LogitsTransforms, eos_ids=(-1,)):
    """Return `RequestParams` as `decode_program` makes them."""
    batch = keys.shape[0]
    eos = jnp.broadcast_to(jnp.asarray(eos_ids, jnp.int32), (batch, len(eos_ids)))
    return RequestParams(keys, lengths, jnp.full(batch, limit), eos, own, drafts)


def first_round(target, drafter, tokens, lengths, keys, transforms, num_draft_tokens, rule=RULES["rejection"]):
    """Run the shipped start and one shipped round, without limit or EOS; return ``(DecodeState, RoundOutput)``."""
    width, length = num_draft_tokens + 1, Fixed(num_draft_tokens)

    @jax.jit
    def program(target, drafter, tokens, lengths, keys, transforms):
        params = request(keys, lengths, width + 1, *transforms)
        state, _ = start(target, drafter, params, tokens, width + 1, length)
        return decode_round(target, drafter, rule, length, params, state)

    return program(target, drafter, tokens, lengths, keys, transforms)


def decode(target, drafter, *batch, max_new_tokens, num_draft_tokens, eos_ids=(-1,), rule=RULES["rejection"]):
    """Run the shipped program, compiled anew at every call so that no cache hides a patched function.

    `batch` is tokens, lengths, keys and transforms.
    """
    eos_ids = jnp.asarray(eos_ids, jnp.int32)
    spec = ProgramSpec(max_new_tokens, as_draft_length(num_draft_tokens), rule)

    def program(target, drafter, tokens, lengths, keys, transforms):
        traced = TracedParams(*transforms, 0, None, eos_ids, 0)
        return decode_program.__wrapped__(target, drafter, PromptBatch(tokens, lengths, keys), traced, spec=spec)[0]

    return jax.jit(program)(target, drafter, *batch)
