# pyright: strict, reportUnknownMemberType=false
"""EAGLE: a trained layer that reads the target's states of the text, and goes on with its own."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.path import at_path, tokens_along
from jspec.cache import KVCache, enlarged
from jspec.drafters.autoregressive import AutoregressiveDrafter
from jspec.drafters.base import Context
from jspec.eagle import Eagle
from jspec.tree import Branches, Level, Tree
from jspec.types import Draft, Verdict, pytree


@pytree
class _Read:
    """What the head has read: the text, or within a draft some of that too.

    Attributes:
        cache: the token at position i, with the state before it, is in slot i - 1; the first token is in none.
        states: ``[B, S, E]`` of the newest tokens, of which what follows them is guessed.
        known: ``bool[B]``, not where a text has one token only.
        lengths: ``int32[B]``, of the text.
    """

    cache: KVCache
    states: Array
    known: Array
    lengths: Array


@pytree
class EagleDrafter(AutoregressiveDrafter[_Read, _Read]):
    """Drafts with an EAGLE head (`jspec.eagle`), which was trained for this target.

    After every round it reads the accepted tokens with the target's own states, in place of those it had guessed (Li et
    al. 2024, section 3). On a static tree (`jspec.TreeDrafter`) weights of generation 1 are EAGLE, on one that grows
    (`jspec.DynamicTreeDrafter`) EAGLE-2; weights of generation 3 are EAGLE-3.

    Attributes:
        head: a `jspec.eagle.Eagle`.
    """

    head: Any
    max_positions = None

    @property
    def vocab_size(self) -> int:
        return self._head.config.layer.vocab_size

    @property
    def features(self) -> tuple[int, ...]:
        return self._head.config.features

    @property
    def _head(self) -> Eagle:
        if not isinstance(self.head, Eagle):
            raise TypeError(f"head is of type {type(self.head).__name__}; pass a jspec.eagle.Eagle.")
        return self.head

    # It asks for more than others, and is told so (`jspec.drafters.base.AskingDrafter`).
    def init(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: Array, num_slots: int, *, features: Array, lengths: Array, target: Any
    ) -> _Read:
        """The prompts, read with the target's states.

        Raises:
            ValueError: the head was made for a target of other sizes.
        """
        head, batch = self._head, len(tokens)
        check_target_of(head, target)
        cache, states = head.new_cache(batch, num_slots), jnp.zeros((batch, 1, head.config.layer.hidden_size))
        states = states.astype(head.dtype)
        if tokens.shape[1] > 1:
            pairs = head.embed(tokens[:, 1:], target), head.fuse(features[:, :-1], target)
            narrow = head.new_cache(batch, tokens.shape[1] - 1)
            found, read = head.forward(*pairs, narrow, jnp.zeros(batch, jnp.int32))
            cache = enlarged(cache, read)
            states = jnp.take_along_axis(found, jnp.maximum(lengths - 2, 0)[:, None, None], axis=1)
        return _Read(cache, states, lengths > 1, lengths)

    def begin(self, state: _Read, context: Context, tree: Tree) -> tuple[Array, _Read]:
        """All of the text has been read."""
        logits = self._head.logits(state.states, context.target.model)[:, 0]
        carry = _Read(state.cache, state.states, state.known, context.lengths)
        return jnp.where(state.known[:, None], logits, -jnp.inf), carry

    def extend(self, carry: _Read, tokens: Array, level: Level, context: Context) -> tuple[Array, _Read]:
        head, target = self._head, context.target.model
        pairs = head.embed(tokens, target), level.of_parents(carry.states)
        start = level.start(context.lengths - 1)
        states, cache = head.forward(*pairs, carry.cache, start, **Branches.argument(level.branches))
        return head.logits(states, target), _Read(cache, states, carry.known, carry.lengths)

    def end(self, carry: _Read) -> _Read:
        return _Read(carry.cache, carry.states[:, :1], carry.known, carry.lengths)

    def commit(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state: _Read, draft: Draft, verdict: Verdict, hidden: Array, *, features: Array, target: Any
    ) -> _Read:
        """Read the new tokens with the target's states; what the draft has left in their slots is gone."""
        head = self._head
        pairs = head.embed(tokens_along(draft, verdict), target), head.fuse(at_path(features, verdict), target)
        found, cache = head.forward(*pairs, state.cache, state.lengths - 1)
        states = jnp.take_along_axis(found, verdict.num_accepted[:, None, None], axis=1)
        return _Read(cache, states, jnp.ones_like(state.known), state.lengths)


def check_target_of(head: Eagle, target: Any) -> None:
    """Raise ValueError unless `head` was made for a target of these sizes."""
    config, sizes = head.config, target.config
    wants = [("hidden size", config.target_hidden_size, sizes.hidden_size),
             ("vocabulary", config.layer.vocab_size, sizes.vocab_size)]  # fmt: skip
    if not config.own_embedding or not config.own_head:
        wants.append(("width of embeddings", config.layer.hidden_size, sizes.hidden_size))
    for name, own, found in wants:
        if own != found:
            raise ValueError(f"The EAGLE head was made for a target whose {name} is {own}, and this target's is "
                             f"{found}; use the head that was trained for it.")  # fmt: skip
