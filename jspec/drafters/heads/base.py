"""Base classes for drafters that add trained heads to the target. The heads read the target's last hidden state."""

from typing import cast

import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance.path import at_path
from jspec.core.tree import Level, Tree
from jspec.core.types import Draft, Verdict, pytree
from jspec.drafters.base import Context
from jspec.drafters.chunked_prefill import where_read
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.llama import Llama


@pytree
class LastState:
    """The target's hidden state at the last token that the target has read.

    Attributes:
        hidden: ``[B, E]``, before the final norm.
        known: ``bool[B]``; False before the first round if the prompt has only one token, so no earlier state exists.
    """

    hidden: Array
    known: Array


class HeadsDrafter(AutoregressiveDrafter[LastState, tuple[LastState, Array]]):
    """A drafter with several heads, each of which drafts the token one position after the previous head's.

    The heads read the state at the second-to-last token. The target's own head has drawn the last token from that
    state, so the first of these heads drafts the first draft token. Verification computes the state anyway, so it
    costs no additional pass.
    """

    features = (-1,)

    @property
    def num_heads(self) -> int:
        """H, the number of consecutive tokens that the heads can draft."""
        raise NotImplementedError

    @property
    def max_chain_length(self) -> int:
        return self.num_heads

    @property
    def hidden_size(self) -> int:
        """E, the hidden size of the target that the heads were made for."""
        raise NotImplementedError

    def first(self, x: Array, context: Context, depth: int) -> tuple[Array, Array]:
        """Return the first head's logits ``[B, V]``, and the data that `extend` needs for a draft of `depth`.

        ``x`` holds the normalised states ``[B, 1, E]``.
        """
        raise NotImplementedError

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> LastState:
        """Return the state at each prompt's second-to-last token, because no token follows the last one yet."""
        (features, target), lengths = signals.states(), signals.known_lengths
        check_hidden_size(type(self).__name__, self.hidden_size, target)
        before = jnp.maximum(lengths - 2, 0)[:, None, None]
        return LastState(jnp.take_along_axis(features[:, :, 0], before, axis=1)[:, 0], lengths > 1)

    def read(self, state: LastState, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> LastState:
        """Return the state at the last token of a piece. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        last = jnp.maximum(count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(signals.states()[0][:, :, 0], last, axis=1)[:, 0]
        return where_read(count, LastState(hidden, jnp.ones_like(state.known)), state)

    def begin(self, state: LastState, context: Context, tree: Tree) -> tuple[Array, tuple[LastState, Array]]:
        count, depth = self.num_heads, tree.max_depth
        if depth > count:
            raise ValueError(
                f"{type(self).__name__} has {count} heads, but a draft of {depth} consecutive tokens needs one head "
                f"per token; draft at most {count}."
            )
        x = context.target.model.norm(state.hidden)[:, None]
        logits, carry = self.first(x, context, depth)
        return jnp.where(state.known[:, None], logits, -jnp.inf), (state, carry)

    def end(self, carry: tuple[LastState, Array]) -> LastState:
        return carry[0]

    def commit(self, state: LastState, draft: Draft, verdict: Verdict, signals: TargetSignals) -> LastState:
        """Return the state after the last accepted token."""
        last = verdict.num_accepted[:, None, None]
        hidden = jnp.take_along_axis(at_path(signals.hidden, verdict), last, axis=1)[:, 0]
        return LastState(hidden, jnp.ones_like(state.known))


class ParallelHeadsDrafter(HeadsDrafter):
    """A drafter whose heads read only the state, so a token's distribution depends only on its depth."""

    def logits(self, x: Array, target: Llama, depth: int) -> Array:
        """Return the first `depth` heads' logits ``float32[B, S, depth, V]`` for normalised states ``[B, S, E]``."""
        raise NotImplementedError

    def first(self, x: Array, context: Context, depth: int) -> tuple[Array, Array]:
        logits = self.logits(x, context.target.model, depth)[:, 0]
        return logits[:, 0], logits

    def extend(
        self, carry: tuple[LastState, Array], tokens: Array, level: Level, context: Context
    ) -> tuple[Array, tuple[LastState, Array]]:
        return jnp.where(carry[0].known[:, None, None], at_depth(carry[1], level, tokens), -jnp.inf), carry


def at_depth(logits: Array, level: Level, tokens: Array) -> Array:
    """Return the logits ``[B, S, V]`` after a level's ``tokens[B, S]``.

    They are taken from ``logits[B, K, V]``, which depend only on depth.
    """
    here = cast(Array, lax.dynamic_index_in_dim(logits, level.depth, axis=1))
    return jnp.broadcast_to(here, (*tokens.shape, here.shape[-1]))


def check_hidden_size(user: str, size: int, target: Llama) -> None:
    """Raise ValueError unless the target's hidden size is the one that `user` was made for."""
    if size != target.config.hidden_size:
        raise ValueError(
            f"{user} was made for a hidden size of {size}, but the target's is {target.config.hidden_size}; use "
            "a drafter that was trained for this target."
        )
