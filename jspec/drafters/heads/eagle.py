# pyright: reportUnnecessaryIsInstance=false
"""EAGLE: a trained layer that reads the target's hidden states, and continues the draft from its own states."""

from pathlib import Path
from typing import Self

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jspec.acceptance.path import at_path, tokens_along
from jspec.core.tree import Branches, Level, Tree
from jspec.core.types import Draft, Verdict, pytree
from jspec.drafters.base import Context
from jspec.drafters.chunked_prefill import where_read
from jspec.drafters.heads import eagle_weights
from jspec.drafters.heads.eagle_module import Eagle, check_target_of
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.kv_cache import KVCache, insert_prefix
from jspec.models.llama import Llama
from jspec.models.quantize import quantized_copy


@pytree
class _Read:
    """The tokens that the head has read: the sequence so far and, during a draft, some of the draft tokens.

    Attributes:
        cache: slot i - 1 holds the keys and values for the token at position i, combined with the state at position
            i - 1. The first token has no slot.
        states: ``[B, S, E]``, the states at the newest tokens, from which the head drafts the next tokens.
        known: ``bool[B]``; False if a sequence has only one token.
        lengths: ``int32[B]``, the sequence lengths.
    """

    cache: KVCache
    states: Array
    known: Array
    lengths: Array


@pytree
class EagleDrafter(AutoregressiveDrafter[_Read, _Read]):
    """A drafter with an EAGLE head (`jspec.drafters.heads.eagle_module`) that was trained for this target.

    After every round, the head reads the accepted tokens again, with the target's own states in place of the states
    that the head predicted (Li et al. 2024, section 3). With generation-1 weights, the drafter is EAGLE on a static
    tree (`jspec.TreeDrafter`), and EAGLE-2 on a dynamic tree (`jspec.DynamicTreeDrafter`). With generation-3 weights,
    it is EAGLE-3.

    Attributes:
        head: a `jspec.drafters.heads.eagle_module.Eagle`.
    """

    head: Eagle

    @classmethod
    def load(cls, path: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Self:
        """Load a head from config.json and safetensors, in the layout of EAGLE, SpecForge, SGLang or speculators.

        Args:
            path: a local directory, or a Hugging Face repo id.
            target: the `jspec.Llama` that the head was trained for. If given, sizes are checked immediately. The target
                is required if config.json does not specify which layers the head reads. It is also required if the
                files have a reduced vocabulary without an output head: rows of the target's output head are then used.
            dtype: the dtype of weights, activations and cache. Same as in `jspec.load`.

        Raises:
            convert.CheckpointError: the files are not those of a single-layer EAGLE head, or are damaged, or are
                pickles. The message says what was found and expected.
            ValueError: the head was made for a target with different sizes.
        """
        return cls(eagle_weights.load(path, target, dtype))

    def quantize(self, kind: str = "int8", activation_bits: int = 24) -> Self:
        """Return a copy with quantised matrices. See `jspec.quantize`.

        Draft tokens are drawn from the quantised head's own distribution, so the output stays exact. The copy cannot be
        saved.

        Args:
            kind: same as in `jspec.quantize`.
            activation_bits: same as in `jspec.load`.

        Raises:
            ValueError: under the same conditions as `jspec.quantize`.
        """
        head = quantized_copy(self._head, kind, self._head.dtype, activation_bits)
        head.quantized = kind
        return type(self)(head)

    def save(self, path: str | Path, format: str = "speculators", own_head: bool | None = None) -> Path:
        """Write config.json, with every flag, and model.safetensors to a new directory.

        A head that was loaded from the same layout is written back unchanged. The new files have the dtype of the old
        ones, unless another dtype was requested or the old dtype would lose precision.

        Args:
            format: "speculators" (read by vLLM) or "sglang" for a generation-3 head; "eagle" for a generation-1 head.
            own_head: whether to write the output head. Pass False only if it is a part of the target's output
                head. By default, it is written if the original files had an output head.

        Raises:
            convert.CheckpointError: programs that read this layout would compute results that differ from the head's,
                or `path` exists or cannot be written.
            ValueError: the drafter is quantised.
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

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _Read:
        """Prefill the prompts with the target's states.

        Raises:
            ValueError: the head was made for a target with different sizes.
        """
        head, batch = self._head, len(tokens)
        (features, target), lengths = signals.states(), signals.known_lengths
        check_target_of(head.config, target)
        cache = head.new_cache(batch, num_slots)
        states = jnp.zeros((batch, 1, head.config.layer.hidden_size), head.dtype)
        if tokens.shape[1] > 1:
            pairs = head.embed(tokens[:, 1:], target), head.fuse(features[:, :-1], target)
            narrow = head.new_cache(batch, tokens.shape[1] - 1)
            found, read = head.forward(*pairs, narrow, jnp.zeros(batch, jnp.int32))
            cache = insert_prefix(cache, read)
            states = jnp.take_along_axis(found, jnp.maximum(lengths - 2, 0)[:, None, None], axis=1)
        return _Read(cache, states, lengths > 1, lengths)

    def read(self, state: _Read, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> _Read:
        """Prefill the next piece of the sequence. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        head, (features, target) = self._head, signals.states()
        pairs = head.embed(tokens[:, 1:], target), head.fuse(features, target)
        found, cache = head.forward(*pairs, state.cache, start)
        states = jnp.take_along_axis(found, jnp.maximum(count - 1, 0)[:, None, None], axis=1)
        new = states, jnp.ones_like(state.known), start + count + 1
        return _Read(cache, *where_read(count, new, (state.states, state.known, state.lengths)))

    def begin(self, state: _Read, context: Context, tree: Tree) -> tuple[Array, _Read]:
        """Return the logits after the sequence so far, all of which has been read."""
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

    def commit(self, state: _Read, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _Read:
        """Read the new tokens with the target's states, overwriting the slots that the draft filled."""
        head, (features, target) = self._head, signals.states()
        pairs = head.embed(tokens_along(draft, verdict), target), head.fuse(at_path(features, verdict), target)
        found, cache = head.forward(*pairs, state.cache, state.lengths - 1)
        states = jnp.take_along_axis(found, verdict.num_accepted[:, None, None], axis=1)
        return _Read(cache, states, jnp.ones_like(state.known), state.lengths)
