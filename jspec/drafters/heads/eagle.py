# pyright: strict, reportUnknownMemberType=false
"""EAGLE: a trained layer that reads the target's states of the text, and goes on with its own."""

from pathlib import Path
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from jspec.acceptance.path import at_path, tokens_along
from jspec.core.tree import Branches, Level, Tree
from jspec.core.types import Draft, Verdict, pytree
from jspec.drafters.base import Context
from jspec.drafters.heads import eagle_weights
from jspec.drafters.heads.eagle_module import Eagle, check_target_of
from jspec.drafters.late_reading import where_read
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.kv_cache import KVCache, enlarged


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
    """Drafts with an EAGLE head (`jspec.drafters.heads.eagle_module`), which was trained for this target.

    After every round it reads the accepted tokens with the target's own states, in place of those it had guessed (Li et
    al. 2024, section 3). On a static tree (`jspec.TreeDrafter`) weights of generation 1 are EAGLE, on one that grows
    (`jspec.DynamicTreeDrafter`) EAGLE-2; weights of generation 3 are EAGLE-3.

    Attributes:
        head: a `jspec.drafters.heads.eagle_module.Eagle`.
    """

    head: Any
    max_positions = None

    @classmethod
    def load(cls, path: str | Path, target: Any = None, dtype: Any = None) -> Self:
        """A head from its files: config.json and safetensors, as EAGLE, SpecForge, SGLang and speculators name them.

        Args:
            path: a directory, or a Hugging Face hub id.
            target: the `jspec.Llama` that it was trained for. Sizes are then checked at once. It is needed where
                config.json does not say which layers the head reads, and where the files have a reduced vocabulary but
                no output head for it: the rows of the target's own are that.
            dtype: of weights, activations and cache; as for `jspec.load`.

        Raises:
            convert.CheckpointError: these are no files of an EAGLE head of one layer, or damaged ones, or pickles; says
                what was found and expected.
            ValueError: the head was made for a target of other sizes.
        """
        return cls(eagle_weights.load(path, target, dtype))

    def save(self, path: str | Path, format: str = "speculators", own_head: bool | None = None) -> Path:
        """Write config.json, every flag in it, and model.safetensors to a new directory.

        What was loaded from the same layout is written as it was, in the dtype of its files unless another was asked
        for or they would lose by it.

        Args:
            format: "speculators", as vLLM reads it, or "sglang", for a head of generation 3; "eagle" for one of
                generation 1.
            own_head: false leaves the output head out, for heads whose own is a part of the target's; true writes it.
                By default it is written where the files it came from had one.

        Raises:
            convert.CheckpointError: who reads this layout would not compute what the head does, or `path` exists or
                cannot be written.
        """
        return eagle_weights.save(self._head, path, format, own_head)

    @property
    def vocab_size(self) -> int:
        return self._head.config.layer.vocab_size

    @property
    def features(self) -> tuple[int, ...]:
        return self._head.config.features

    @property
    def _head(self) -> Eagle:
        if not isinstance(self.head, Eagle):
            raise TypeError(
                f"head is of type {type(self.head).__name__}; pass a jspec.drafters.heads.eagle_module.Eagle."
            )
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
        check_target_of(head.config, target)
        cache = head.new_cache(batch, num_slots)
        states = jnp.zeros((batch, 1, head.config.layer.hidden_size), head.dtype)
        if tokens.shape[1] > 1:
            pairs = head.embed(tokens[:, 1:], target), head.fuse(features[:, :-1], target)
            narrow = head.new_cache(batch, tokens.shape[1] - 1)
            found, read = head.forward(*pairs, narrow, jnp.zeros(batch, jnp.int32))
            cache = enlarged(cache, read)
            states = jnp.take_along_axis(found, jnp.maximum(lengths - 2, 0)[:, None, None], axis=1)
        return _Read(cache, states, lengths > 1, lengths)

    def read(self, state: _Read, tokens: Array, start: Array, count: Array, *, features: Array, target: Any) -> _Read:
        """The next piece of the text, see `jspec.drafters.late_reading.read_on`."""
        head = self._head
        pairs = head.embed(tokens[:, 1:], target), head.fuse(features, target)
        found, cache = head.forward(*pairs, state.cache, start)
        states = jnp.take_along_axis(found, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        new = states, jnp.ones_like(state.known), start + count + 1
        return _Read(cache, *where_read(count, new, (state.states, state.known, state.lengths)))

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
        logits = jnp.where(carry.known[:, None, None], head.logits(states, target), -jnp.inf)
        return logits, _Read(cache, states, carry.known, carry.lengths)

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
