"""Verification: one forward pass of the target over a draft."""

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypedDict, Unpack, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance.path import num_guessed
from jspec.core.sampling import token_probs
from jspec.core.tree import Branches
from jspec.core.types import Draft
from jspec.decoding.state import DecodeState, RequestParams
from jspec.drafters.draft_length import DraftLength, compiled_lengths
from jspec.models.kv_cache import KVCache, append
from jspec.models.llama import Llama


class TargetOutput(NamedTuple):
    """The target's output at the last token and at every draft token, ``[B, N + 1, ...]``.

    Attributes:
        hidden: ``[.., E]``, the hidden states before the final norm.
        features: ``[.., F, E]``, other hidden states, if requested.
        logits: ``float32[.., V]``.
        probs: ``float32[.., V]``, the distributions after all transforms.
    """

    hidden: Array
    features: Array
    logits: Array
    probs: Array


class _PassArguments(TypedDict, total=False):
    """The arguments of a model's pass that only some models support."""

    embeddings: Array
    branches: Branches
    past: tuple[KVCache, Array]


def last_token(state: DecodeState) -> Array:
    """Return ``int32[B]``, each row's newest token, which the target has not read yet."""
    return jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]


def verify(
    target: Llama,
    draft_length: DraftLength,
    params: RequestParams,
    state: DecodeState,
    draft: Draft,
    features: Sequence[int],
    embeddings: Array | None,
    allowed: Array | None = None,
) -> tuple[TargetOutput, KVCache]:
    """Return the target's output for a draft, and its KV cache including the whole draft.

    Args:
        features: same as in `jspec.Llama.forward_with_features`; empty for a model without this method.
        embeddings: same as in `jspec.Llama.forward`; None for a model whose `forward` does not take them.
        allowed: ``bool[B, N + 1, V]``, the allowed tokens at each position; None for all.
    """
    start = state.lengths - 1
    block = jnp.concatenate([last_token(state)[:, None], draft.tokens], axis=1)
    lengths, branches = compiled_lengths(draft_length), draft.topology.branches

    def read(block: Array, cache: KVCache, **how: Unpack[_PassArguments]) -> tuple[TargetOutput, KVCache]:
        if embeddings is not None:
            how["embeddings"] = embeddings
        if features:
            hidden, target_features, cache = target.forward_with_features(block, cache, start, features, **how)
        else:
            hidden, cache = target.forward(block, cache, start, **how)
            target_features = jnp.zeros((*hidden.shape[:2], 0, hidden.shape[2]), hidden.dtype)
        logits, drafted = target.logits(hidden), draft.tokens[:, : block.shape[1] - 1]
        seen = None if branches is None else branches.visible[..., 1:]
        masked = logits if allowed is None else jnp.where(allowed[:, : block.shape[1]], logits, -jnp.inf)
        probs = token_probs(masked, params.transforms, state.token_counts, drafted, seen)
        return TargetOutput(hidden, target_features, logits, probs), cache

    if len(lengths) == 1:
        return read(block, state.cache, **Branches.argument(branches))

    def up_to(k: int) -> tuple[TargetOutput, KVCache]:
        # Only read the cache here, because XLA would copy it if one of several branches updated it.
        reading, new = read(block[:, : k + 1], target.new_cache(*block.shape), past=(state.cache, start))
        missing = block.shape[1] - 1 - k

        def padded(part: Array) -> Array:
            return jnp.pad(part, [(0, 0), (0, missing)] + [(0, 0)] * (part.ndim - 2))

        return jax.tree.map(padded, reading), new

    shortest = jnp.searchsorted(jnp.array(lengths), num_guessed(draft).max())
    reading, new = cast(
        tuple[TargetOutput, KVCache], lax.switch(shortest, [functools.partial(up_to, k) for k in lengths])
    )
    return reading, append(state.cache, new, start)
