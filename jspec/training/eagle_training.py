"""EAGLE heads in training: a head's logits for whole sequences, computed step by step as when drafting."""

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.generation_config import SamplingDefaults
from jspec.drafters.draft_vocabulary import draft_ids_of
from jspec.drafters.heads.eagle_module import Eagle, EagleConfig
from jspec.models.llama import Llama
from jspec.models.products import einsum
from jspec.models.rope import rope_tables, rotate
from jspec.training.heads import later


def new_head(target: Llama, draft_ids: np.ndarray | None, seed: int) -> Eagle:
    """Return a float32 EAGLE-3 head for `target` that reads hidden states from its early, middle and late layers.

    The head normalises its own output before reading it again, and normalises each of the target's states (EAGLE-3.1).
    The embedding and the output head are copied from the target, and training does not change them. The output head has
    only the columns for `draft_ids`.

    Args:
        draft_ids: the tokens that the head can draft, in ascending order; None for all.
        seed: the seed for the initial weights.
    """
    config, depth = target.config, len(target.layers)
    plain = dict.fromkeys(("tie_word_embeddings", "qk_norm", "qkv_bias", "attention_bias", "mlp_bias"), False)
    layer = dataclasses.replace(config, num_hidden_layers=1, sampling=SamplingDefaults(), **plain)
    few = draft_ids is not None
    sizes = config.hidden_size, features(depth), len(draft_ids) if few else None
    head_config = EagleConfig(3, layer, *sizes, own_head=few, fc_norm=True, norm_output=True)
    head = Eagle(head_config, jnp.float32, rngs=nnx.Rngs(seed))
    if few:
        share_head(head, target, draft_ids)
    return head


def features(depth: int) -> tuple[int, ...]:
    """Return the indices of the states to read from a target with `depth` layers: early, middle and late inputs.

    EAGLE-3 uses the inputs of layers 2, L/2 and L - 3. In a small model, these layers are too close together. In a
    model with one or two layers, all three inputs are the same.
    """
    return tuple(sorted({min(1, depth - 1), depth // 2, depth - 1}))


def share_head(head: Eagle, target: Llama, draft_ids: np.ndarray) -> None:
    """Copy the columns for `draft_ids` from the target's output head to `head`."""
    assert head.lm_head is not None and head.draft_ids is not None
    head.draft_ids.set_value(draft_ids_of(draft_ids, target.config.vocab_size))
    head.lm_head.weight.set_value(target.head.wide(draft_ids))


def unroll(head: Eagle, target: Llama, tokens: Array, states: Array, depth: int) -> Iterator[Array]:
    """Yield the logits of `head` if the last 0, 1, ... states that it reads are its own.

    EAGLE-3 calls this the "training-time test".

    Args:
        tokens: ``int32[B, S]``.
        states: ``[B, S, F, E]``, the states of `head.config.features`.
        depth: the number of passes.

    Yields:
        ``float32[B, S - 1, D]``: logits at position t for the token t + 2.
    """
    embeddings, hidden = head.embed(tokens[:, 1:], target), head.fuse(states[:, :-1], target)
    layer, positions = head.config.layer, jnp.arange(tokens.shape[1] - 1)[None]
    tables = rope_tables(positions, layer.rope, layer.head_dim)
    seen: list[tuple[Array, Array]] = []
    for _ in range(depth):
        x, read = head.into_layer(embeddings, hidden)
        q, k, v = head.self_attn.split(head.self_attn.qkv_proj(read))
        seen.append((rotate(k, tables), v))
        hidden = head.out_of_layer(x, _attend(rotate(q, tables), seen))
        yield head.draft_logits(hidden, target)
        hidden = later(hidden, 1)  # the next token's pass reads this state


def _attend(q: Array, seen: list[tuple[Array, Array]]) -> Array:
    """Attend to a sequence in which each position and the last few before it are drafts (later passes in `seen`).

    Among the first pass's keys, a position sees all positions up to its drafts. Among each later pass's keys, it sees
    only the position that belongs to its draft. The scores are therefore one matrix, plus one column per later pass.

    Args:
        q: ``[B, H, S, D]``.
        seen: the keys and values ``[B, G, S, D]`` from every pass so far.

    Returns:
        ``[B, S, H D]``.
    """
    (batch, heads, size, width), drafts = q.shape, len(seen) - 1
    keys, values = seen[0]
    q = q.reshape(batch, keys.shape[1], -1, size, width)
    # Pass i's key meets the query `drafts - i` positions later, in a column next to those of the sequence.
    own = [
        [later(part.swapaxes(1, 2), drafts - i).swapaxes(1, 2)[:, :, None] for part in pair]
        for i, pair in enumerate(seen[1:], 1)
    ]
    mask = np.tril(np.ones((size, size), bool), -drafts)
    begun = np.arange(size)[:, None] >= drafts - np.arange(1, drafts + 1)  # the first positions have fewer drafts
    parts = [einsum("bgrsd,bgtd->bgrst", q, keys, jnp.float32)]
    parts += [(q.astype(jnp.float32) * key).sum(-1, keepdims=True) for key, _ in own]
    scores = jnp.concatenate(parts, axis=-1) / math.sqrt(width)
    scores = jnp.where(np.hstack([mask, begun]), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    # Zeros fill the drafts' columns, because XLA finds no tiling on an H100 for a product with only some columns.
    text = jnp.pad(values, ((0, 0), (0, 0), (0, drafts), (0, 0)))
    mixed = einsum("bgrst,bgtd->bgrsd", weights, text, jnp.float32)
    for i, (_, value) in enumerate(own):
        mixed += weights[..., size + i, None].astype(jnp.float32) * value
    return mixed.astype(q.dtype).reshape(batch, heads, size, width).swapaxes(1, 2).reshape(batch, size, -1)
