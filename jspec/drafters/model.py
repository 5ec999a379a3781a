"""A separate, smaller language model as the drafter: a `lax.scan` over its own KV cache."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.cache import KVCache, prefill
from jspec.drafters.base import Context
from jspec.sampling import add_seen, token_probs
from jspec.types import Draft, Verdict, pytree


@pytree
class ModelDrafter:
    """Drafts with `model`, any `jspec.Llama` with the target's vocabulary (Leviathan et al. 2023, section 2)."""

    model: Any

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.model.config.max_position_embeddings

    def init(self, tokens: Array, num_slots: int) -> KVCache:
        """The prompt, read into a cache of `num_slots`."""
        return prefill(self.model, tokens, num_slots)

    def propose(self, cache: KVCache, context: Context, num_draft_tokens: int) -> tuple[Draft, KVCache]:
        """Draw token after token, each from the model's law given those before it."""

        def draw(hidden: Array, seen: Any, offset: Array | int) -> tuple[Array, Array, Any]:
            probs = token_probs(self.model.logits(hidden), context.warp, seen)[:, 0]
            token = context.draw(offset, probs)
            if seen is not None:
                seen = add_seen(seen, token[:, None], jnp.ones((token.size, 1), bool))
            return token, probs, seen

        def step(carry: tuple, offset: Array) -> tuple[tuple, tuple[Array, Array]]:
            cache, token, seen = carry
            hidden, cache = self.model.forward(token[:, None], cache, context.lengths + offset - 1)
            token, probs, seen = draw(hidden, seen, offset)
            return (cache, token, seen), (token, probs)

        hidden, cache = self._last_hidden(cache, context)
        token, probs, seen = draw(hidden, context.seen, 0)
        (cache, _, _), rest = lax.scan(step, (cache, token, seen), jnp.arange(1, num_draft_tokens))
        tokens, laws = jax.tree.map(lambda first, more: jnp.concatenate([first[None], more]), (token, probs), rest)
        return Draft(tokens.swapaxes(0, 1), laws.swapaxes(0, 1)), cache

    def commit(self, cache: KVCache, draft: Draft, verdict: Verdict, hidden: Array) -> KVCache:
        """Nothing to do: the cache rolls back with the row's length."""
        return cache

    def _last_hidden(self, cache: KVCache, context: Context) -> tuple[Array, KVCache]:
        """Hidden state ``[B, 1, E]`` at the last committed token.

        Feeds the last *two* tokens. Where the whole draft was accepted, the cache lacks its last token, which was drawn
        but never fed; feeding it here costs one more row, where a further pass would cost all the weights again.
        """
        start = jnp.maximum(context.lengths - 2, 0)
        last_two = jax.vmap(lambda row, at: lax.dynamic_slice(row, (at,), (2,)))(context.tokens, start)
        hidden, cache = self.model.forward(last_two, cache, start)
        # A row of one token reads one slot too many; the next step overwrites it before it is seen.
        last = (context.lengths - 1 - start)[:, None, None]
        return jnp.take_along_axis(hidden, last, axis=1), cache
