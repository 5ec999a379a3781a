"""A separate, smaller language model as the drafter, with its own KV cache."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jspec.cache import KVCache, prefill
from jspec.drafters.autoregressive import AutoregressiveDrafter
from jspec.drafters.base import Context, last_tokens
from jspec.llama import Llama
from jspec.types import Draft, Verdict, pytree


@pytree
class ModelDrafter(AutoregressiveDrafter):
    """Drafts with `model`, any `jspec.Llama` with the target's vocabulary (Leviathan et al. 2023, section 2)."""

    model: Any

    @property
    def vocab_size(self) -> int:
        if not hasattr(self.model, "config"):
            raise TypeError(f"model is of type {type(self.model).__name__}; pass a model, such as jspec.load(...).")
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.model.config.max_position_embeddings

    def init(self, tokens: Array, num_slots: int) -> KVCache:
        """The prompt, read into a cache of `num_slots`."""
        return prefill(self.model, tokens, num_slots)

    def begin(self, cache: KVCache, context: Context, num_draft_tokens: int) -> tuple[Array, KVCache]:
        """The first pass reads all that may be unread.

        Where the whole draft was accepted, the cache lacks its last token, which was drawn but never read. That costs a
        few more rows, where a pass for it would cost all the weights again.
        """
        block, start, last = last_tokens(context.tokens, context.lengths, context.unread)
        # A row that is shorter than that writes slots past its end; the next steps overwrite them unseen.
        hidden, cache = self.model.forward(block, cache, start)
        return self.model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0], cache

    def step(self, cache: KVCache, token: Array, k: Array, context: Context) -> tuple[Array, KVCache]:
        hidden, cache = self.model.forward(token[:, None], cache, context.lengths + k - 1)
        return self.model.logits(hidden)[:, 0], cache

    def end(self, cache: KVCache) -> KVCache:
        return cache

    def commit(self, cache: KVCache, draft: Draft, verdict: Verdict, hidden: Array) -> KVCache:
        """Nothing to do: the cache rolls back with the row's length."""
        return cache


def as_drafter(draft: Any) -> Any:
    """The drafter that `draft` is, or that drafts with the model it is; TypeError for a class."""
    if isinstance(draft, type):
        raise TypeError(f"draft is the class {draft.__name__}; pass an object of it, such as {draft.__name__}(...).")
    return ModelDrafter(draft) if isinstance(draft, Llama) else draft
