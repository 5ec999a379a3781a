"""Drafting token after token: what every drafter does whose law depends on its own draft."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.drafters.base import Context
from jspec.sampling import add_seen, token_probs
from jspec.types import Draft


def draft_chain(
    step: Callable[[Any, Array, Array], tuple[Array, Any]],
    carry: Any,
    first_logits: Array,
    context: Context,
    num_draft_tokens: int,
) -> tuple[Draft, Any]:
    """Draw a draft, each token from the law its logits have after the sampling transforms.

    Args:
        step: ``(carry, token int32[B], k) -> (logits [B, V], carry)``: reads draft token k - 1, gives the logits of
            draft token k.
        carry: what the first `step` starts from.
        first_logits: ``[B, V]``, of draft token 0.
    """

    def draw(logits: Array, seen: Any, k: Array | int) -> tuple[Array, Array, Any]:
        probs = token_probs(logits[:, None], context.warp, seen)[:, 0]
        token = context.draw(k, probs)
        if seen is not None:
            seen = add_seen(seen, token[:, None], jnp.ones((token.size, 1), bool))
        return token, probs, seen

    def advance(state: tuple, k: Array) -> tuple[tuple, tuple[Array, Array]]:
        carry, token, seen = state
        logits, carry = step(carry, token, k)
        token, probs, seen = draw(logits, seen, k)
        return (carry, token, seen), (token, probs)

    token, probs, seen = draw(first_logits, context.seen, 0)
    (carry, _, _), rest = lax.scan(advance, (carry, token, seen), jnp.arange(1, num_draft_tokens))
    tokens, laws = jax.tree.map(lambda first, more: jnp.concatenate([first[None], more]), (token, probs), rest)
    return Draft(tokens.swapaxes(0, 1), laws.swapaxes(0, 1)), carry
