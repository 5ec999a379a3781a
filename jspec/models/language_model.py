"""The model contract: what decoding needs from a target or a draft model."""

from collections.abc import Sequence
from typing import Protocol

import jax.numpy as jnp
from jax import Array

from convert.config import LlamaConfig
from jspec.core.tree import Branches
from jspec.models.kv_cache import KVCache


class HasConfig(Protocol):
    """A model, or a stand-in for one in a process that has no weights."""

    @property
    def config(self) -> LlamaConfig: ...


class LanguageModel(HasConfig, Protocol):
    """A decoder that reads tokens through a KV cache, such as `jspec.Llama`.

    Training, quantisation and early exit need more than this protocol; they take a `jspec.Llama`.
    """

    @property
    def dtype(self) -> jnp.dtype: ...

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """Return an empty KV cache with `slots` positions for each of `batch` rows."""
        ...

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
        """Run ``tokens[B, S]`` at positions ``start[b]`` onward in each row. See `jspec.Llama.forward`."""
        ...

    def logits(self, hidden: Array) -> Array:
        """Return ``float32[B, S, V]`` for the hidden states of `forward`."""
        ...


def vocab_size_of(name: str, model: LanguageModel) -> int:
    """Return a model's vocabulary size.

    Raises:
        TypeError: the argument called `name` is not a model.
    """
    if not hasattr(model, "config"):
        raise TypeError(f"{name} is of type {type(model).__name__}; pass a model, such as jspec.load(...).")
    return model.config.vocab_size
