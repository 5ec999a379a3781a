# pyright: strict, reportUnknownMemberType=false
"""EAGLE heads in training: the logits of a head for whole texts, step by step as in a draft."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.generation_config import SamplingDefaults
from jspec.drafters.heads.eagle_module import Eagle, EagleConfig
from jspec.models.layers import einsum
from jspec.models.rope import rope_tables, rotate
from jspec.training.heads import later


def new_head(target: Any, draft_ids: np.ndarray | None, seed: int) -> Eagle:
    """Return a float32 head of generation 3 for `target` that reads states from early, midway and late in it.

    The head norms its own output before it reads it again, and norms each of the target's states (EAGLE-3.1). Its
    embedding and its output head are the target's, and stay so. It has the output head's columns of `draft_ids`.

    Args:
        draft_ids: the tokens that the head can draft, ascending; None for all.
        seed: the seed of the initial weights.
    """
    config, depth = target.config, len(target.layers)
    plain = dict.fromkeys(("tie_word_embeddings", "qk_norm", "qkv_bias", "attention_bias", "mlp_bias"), False)
    layer = dataclasses.replace(config, num_hidden_layers=1, sampling=SamplingDefaults(), **plain)
    few = draft_ids is not None
    head = Eagle(
        EagleConfig(3, layer, config.hidden_size, features(depth), len(draft_ids) if few else None, own_head=few,
                    fc_norm=True, norm_output=True),
        jnp.float32, rngs=nnx.Rngs(seed))  # fmt: skip
    if few:
        share_head(head, target, draft_ids)
    return head


def features(depth: int) -> tuple[int, ...]:
    """Return the states to read from a target of `depth` layers: the inputs of its second, middle and last layer.

    EAGLE-3 takes the inputs of layers 2, L/2 and L - 3. In a small model these lie too close together. In a model of
    one or two layers all of them are the same.
    """
    return tuple(sorted({min(1, depth - 1), depth // 2, depth - 1}))


def share_head(head: Eagle, target: Any, draft_ids: np.ndarray) -> None:
    """Give `head` the columns of the target's output head for `draft_ids`."""
    assert head.lm_head is not None and head.draft_ids is not None
    known = np.full(target.config.vocab_size, len(draft_ids), np.int32)
    known[draft_ids] = np.arange(len(draft_ids))
    head.draft_ids.set_value(jnp.asarray(known))
    head.lm_head.weight.set_value(target.head.wide(draft_ids))


def unroll(head: Eagle, target: Any, tokens: Array, states: Array, depth: int) -> Iterator[Array]:
    """Yield the logits of `head` if the last 0, 1, ... states that it reads are its own.

    EAGLE-3 calls this the "training-time test".

    Args:
        tokens: ``int32[B, S]``.
        states: ``[B, S, F, E]``, the states of `head.config.features`.
        depth: the number of passes.

    Yields:
        ``float32[B, S - 1, D]``: logits at position t for the token t + 2.
    """
    embeddings, told = head.embed(tokens[:, 1:], target), head.fuse(states[:, :-1], target)
    layer, positions = head.config.layer, jnp.arange(tokens.shape[1] - 1)[None]
    tables = rope_tables(positions, layer.rope, layer.head_dim)
    seen: list[tuple[Array, Array]] = []
    for _ in range(depth):
        x, read = head.into_layer(embeddings, told)
        q, k, v = head.self_attn.split(head.self_attn.qkv_proj(read))
        seen.append((rotate(k, tables), v))
        told = head.out_of_layer(x, _attend(rotate(q, tables), seen))
        yield head.draft_logits(told, target)
        told = later(told, 1)  # the next token reads it


def _attend(q: Array, seen: list[tuple[Array, Array]]) -> Array:
    """Attend to a text in which each position and the last ones before it are drafts: all but the first of `seen`.

    From the first pass, a position sees all positions up to its drafts. From each later pass, it sees the one position
    that belongs to its draft. So there is one matrix of scores and, for each later pass, a column.

    Args:
        q: ``[B, H, S, D]``.
        seen: keys and values ``[B, G, S, D]`` of every pass so far.

    Returns:
        ``[B, S, H D]``.
    """
    (batch, heads, size, width), drafts = q.shape, len(seen) - 1
    keys, values = seen[0]
    q = q.reshape(batch, keys.shape[1], -1, size, width)
    # A key of pass i meets the query that comes `drafts - i` later, and has a column beside those of the text.
    own = [[later(part.swapaxes(1, 2), drafts - i).swapaxes(1, 2)[:, :, None] for part in pair]
           for i, pair in enumerate(seen[1:], 1)]  # fmt: skip
    mask = np.tril(np.ones((size, size), bool), -drafts)
    begun = np.arange(size)[:, None] >= drafts - np.arange(1, drafts + 1)  # fewer drafts at the start
    parts = [einsum("bgrsd,bgtd->bgrst", q, keys, jnp.float32)]
    parts += [(q.astype(jnp.float32) * key).sum(-1, keepdims=True) for key, _ in own]
    scores = jnp.concatenate(parts, axis=-1) / math.sqrt(width)
    scores = jnp.where(np.hstack([mask, begun]), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    # Zeros fill the drafts' columns, because XLA finds no tiles on an H100 for a product with a part of the columns.
    text = jnp.pad(values, ((0, 0), (0, 0), (0, drafts), (0, 0)))
    mixed = einsum("bgrst,bgtd->bgrsd", weights, text, jnp.float32)
    for i, (_, value) in enumerate(own):
        mixed += weights[..., size + i, None].astype(jnp.float32) * value
    return mixed.astype(q.dtype).reshape(batch, heads, size, width).swapaxes(1, 2).reshape(batch, size, -1)
