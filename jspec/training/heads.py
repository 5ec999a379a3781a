"""The logits of heads, adapters, vectors and models in training, for whole sequences.

All functions yield ``float32[B, S, V]`` for each depth. At position t, all depths predict the same token. The logits of
each further depth are therefore computed from one fewer token.
"""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.core.tree import Branches
from jspec.drafters.drafts import fit_vocabulary
from jspec.drafters.heads.base import ParallelHeadsDrafter
from jspec.drafters.heads.hydra import HydraDrafter
from jspec.drafters.heads.kangaroo import KangarooDrafter
from jspec.drafters.heads.parallel_sampling import PassDrafter
from jspec.drafters.standalone.model import ModelDrafter
from jspec.models.llama import Llama
from jspec.training.target_states import TargetStates


def later(rows: Array, depth: int) -> Array:
    """Shift ``rows[B, S, ...]`` right by `depth` positions. The first positions become zeros."""
    return jnp.pad(rows, [(0, 0), (depth, 0)] + [(0, 0)] * (rows.ndim - 2))[:, : rows.shape[1]]


def parallel(
    drafter: ParallelHeadsDrafter, target: Llama, tokens: Array, target_states: TargetStates, depth: int
) -> Iterator[Array]:
    """Yield the logits of each Medusa or blockwise head, shifted so that those at position t predict token t + 2."""
    logits = drafter.logits(target.norm(target_states.hidden), target, depth)
    for i in range(depth):
        yield later(logits[:, :, i], i)


def hydra(
    drafter: HydraDrafter, target: Llama, tokens: Array, target_states: TargetStates, depth: int
) -> Iterator[Array]:
    """Yield logits at position t for the token t + 2, given the tokens up to t + 1."""
    newest = jnp.roll(target.embed_tokens(tokens), -1, axis=1)  # the last position has no next token
    read = target.norm(target_states.hidden)
    for i in range(depth):
        read = jnp.concatenate([read, newest.astype(read.dtype)], axis=-1)
        yield drafter.heads[i](read, target)
        read = later(read, 1)


def _causal(size: int) -> Branches:
    """Return a one-branch tree for a sequence, because the fused kernels for plain sequences have no gradients."""
    return Branches(np.arange(size), np.tril(np.ones((size, size), bool)))


def kangaroo(
    drafter: KangarooDrafter, target: Llama, tokens: Array, target_states: TargetStates, depth: int
) -> Iterator[Array]:
    """Yield logits at position t for the token t + 1.

    For draft tokens, the adapter reads the states that the target would have. One depth therefore represents all
    depths.
    """
    batch, size = tokens.shape
    cache, start = drafter.adapter.new_cache(batch, size), jnp.zeros(batch, jnp.int32)
    x, _ = drafter.adapter(target_states.states[:, :, 0], cache, start, _causal(size))
    yield target.head.logits(x.astype(target.dtype))


def look_ahead(
    drafter: PassDrafter, target: Llama, tokens: Array, target_states: TargetStates, depth: int
) -> Iterator[Array]:
    """Yield logits at position t for the token t + 2. The target's input has all vectors after every token."""
    count, (batch, size) = len(drafter.embeddings), tokens.shape
    vectors = jnp.tile(target.config.vocab_size + jnp.arange(count, dtype=tokens.dtype), (batch, size))
    nodes = jnp.concatenate([tokens, vectors], axis=1)
    cache, start = target.new_cache(*nodes.shape), jnp.zeros(batch, jnp.int32)
    hidden, _ = target.forward(nodes, cache, start, branches=_behind_all(size, count), embeddings=drafter.embeddings)
    hidden = hidden[:, size:].reshape(batch, size, count, -1)
    for i in range(min(depth, count)):
        yield later(target.logits(hidden[:, :, i]), i)


def model(
    drafter: ModelDrafter, target: Llama, tokens: Array, target_states: TargetStates, depth: int
) -> Iterator[Array]:
    """Yield logits at position t for the token t + 1. A model processes draft tokens like all other tokens."""
    batch, size = tokens.shape
    cache, start = drafter.model.new_cache(batch, size), jnp.zeros(batch, jnp.int32)
    hidden, _ = drafter.model.forward(tokens, cache, start, branches=_causal(size))
    yield fit_vocabulary(drafter.model.logits(hidden), target.config.vocab_size)


def _behind_all(size: int, count: int) -> Branches:
    """Return a tree of ``[S + S M]`` nodes: `size` tokens in sequence, and `count` vectors after each token."""
    at, place = np.repeat(np.arange(size), count), np.tile(np.arange(count), size)
    text = np.tril(np.ones((size, size), bool))
    before = (at == at[:, None]) & (place <= place[:, None])
    visible = np.block([[text, np.zeros((size, size * count), bool)], [text[at], before]])
    return Branches(np.concatenate([np.arange(size), at + 1 + place]), visible)
