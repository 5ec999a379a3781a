"""Drafting token after token: what all drafters share whose law for a token depends on the tokens before it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.drafters.base import Context
from jspec.sampling import add_seen, token_probs
from jspec.types import Draft


class Chain:
    """A drafter that says, one by one, what law the next token has: `begin` and `step`; `propose` draws from those.

    `carry`, a pytree, is what it remembers within a draft; `end` makes the state of the next round of it.
    """

    def begin(self, state: Any, context: Context, num_draft_tokens: int) -> tuple[Array, Any]:
        """Logits ``[B, V]`` of draft token 0, and the carry. Logits of -inf alone stand for "no guess"."""
        raise NotImplementedError

    def step(self, carry: Any, token: Array, k: Array, context: Context) -> tuple[Array, Any]:
        """Read draft token k - 1, ``int32[B]``; logits ``[B, V]`` of draft token k, and the carry."""
        raise NotImplementedError

    def end(self, carry: Any) -> Any:
        """The state after the draft. Here the carry itself."""
        return carry

    def propose(self, state: Any, context: Context, num_draft_tokens: int) -> tuple[Draft, Any]:
        """Draw a draft, each token from the law its logits have after the sampling transforms."""

        def draw(logits: Array, seen: Any, k: Array | int) -> tuple[Array, Array, Any]:
            probs = token_probs(logits[:, None], context.warp, seen)[:, 0]
            token = context.draw(k, probs)
            if seen is not None:
                seen = add_seen(seen, token[:, None], jnp.ones((token.size, 1), bool))
            return token, probs, seen

        def advance(carried: tuple, k: Array) -> tuple[tuple, tuple[Array, Array]]:
            carry, token, seen = carried
            logits, carry = self.step(carry, token, k, context)
            token, probs, seen = draw(logits, seen, k)
            return (carry, token, seen), (token, probs)

        logits, carry = self.begin(state, context, num_draft_tokens)
        token, probs, seen = draw(logits, context.seen, 0)
        (carry, _, _), rest = lax.scan(advance, (carry, token, seen), jnp.arange(1, num_draft_tokens))
        tokens, laws = jax.tree.map(lambda first, more: jnp.concatenate([first[None], more]), (token, probs), rest)
        return Draft(tokens.swapaxes(0, 1), laws.swapaxes(0, 1)), self.end(carry)
