# pyright: strict, reportUnknownMemberType=false
"""EAGLE heads in training: what one says of whole texts, step by step as in a draft."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jspec.eagle import Eagle, EagleConfig, head_columns
from jspec.tree import Branches


def new_head(target: Any, draft_ids: np.ndarray | None, seed: int) -> Eagle:
    """A head of generation 3 for `target`, in float32, that reads states from early, midway and late in it.

    Its own output is normed before it is read again, and the target's states each (EAGLE-3.1). Embedding and output
    head are the target's, and stay so; of the head it has the columns of `draft_ids`.

    Args:
        draft_ids: the tokens it can guess, ascending; None for all.
        seed: of the initial weights.
    """
    config, depth = target.config, len(target.layers)
    plain = dict.fromkeys(("tie_word_embeddings", "qk_norm", "qkv_bias", "attention_bias", "mlp_bias"), False)
    layer = dataclasses.replace(config, num_hidden_layers=1, **plain)
    few = draft_ids is not None
    head = Eagle(
        EagleConfig(3, layer, config.hidden_size, features(depth), len(draft_ids) if few else None, own_head=few,
                    fc_norm=True, norm_output=True),
        jnp.float32, rngs=nnx.Rngs(seed))  # fmt: skip
    if few:
        share_head(head, target, draft_ids)
    return head


def features(depth: int) -> tuple[int, ...]:
    """Which states of a target of `depth` layers: what enters its second, its middle and its last one.

    EAGLE-3 takes what enters layers 2, L/2 and L - 3; in a small model these lie too close together, and in one of one
    or two layers all is the same.
    """
    return tuple(sorted({min(1, depth - 1), depth // 2, depth - 1}))


def share_head(head: Eagle, target: Any, draft_ids: np.ndarray) -> None:
    """Give `head` the columns of the target's output head that are those of `draft_ids`."""
    assert head.lm_head is not None and head.draft_ids is not None
    known = np.full(target.config.vocab_size, len(draft_ids), np.int32)
    known[draft_ids] = np.arange(len(draft_ids))
    head.draft_ids.set_value(jnp.asarray(known))
    head.lm_head.weight.set_value(head_columns(target, draft_ids))


def unroll(head: Eagle, target: Any, tokens: Array, states: Array, depth: int) -> Iterator[Array]:
    """What `head` says when the last 0, 1, ... of the states it reads are its own ("training-time test", EAGLE-3).

    Args:
        tokens: ``int32[B, S]``.
        states: ``[B, S, F, E]``, those of `head.config.features`.
        depth: how many times.

    Yields:
        ``float32[B, S - 1, D]``: at t of the token t + 2.
    """
    batch, size = len(tokens), tokens.shape[1] - 1
    embeddings, told = head.embed(tokens[:, 1:], target), head.fuse(states[:, :-1], target)
    cache, start = head.new_cache(batch, depth * size), jnp.zeros(batch, jnp.int32)
    for step in range(depth):
        branches = Branches(np.arange(size), _visible(size, step))
        told, cache = head.forward(embeddings, told, cache, start, branches=branches)
        yield head.draft_logits(told, target)
        told = jnp.pad(told, ((0, 0), (1, 0), (0, 0)))[:, :-1]  # the token after reads it


def _visible(size: int, step: int) -> np.ndarray:
    """``bool[S, (step + 1) S]``: what each position sees when the last `step` before it, and itself, are drafts.

    Of the first pass all up to there; of pass i the one position which comes i later.
    """
    at = np.arange(size)
    seen = [at <= at[:, None] - step]
    seen += [at == at[:, None] - step + i for i in range(1, step + 1)]
    whole = np.concatenate(seen, axis=1)
    whole[at, step * size + at] = True  # where a text has just begun, too
    return whole
