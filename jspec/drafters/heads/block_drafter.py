# pyright: reportUnnecessaryIsInstance=false
"""A drafter that predicts a block of tokens in one pass, and corrects each by the token before it."""

import dataclasses
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from convert.heads.block.config import check_target_of
from jspec.acceptance.path import at_path
from jspec.core.tree import Level, Tree
from jspec.core.types import Draft, Verdict, pytree
from jspec.drafters.base import Context
from jspec.drafters.chunked_prefill import where_read
from jspec.drafters.heads import block_weights
from jspec.drafters.heads.base import at_depth
from jspec.drafters.heads.block_module import Block
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.kv_cache import KVCache, insert_prefix, whole_tiles
from jspec.models.llama import Llama
from jspec.models.quantize import quantized_copy


@pytree
class _Read:
    """The target's states that the drafter has read.

    Attributes:
        cache: slot i holds the keys and values of the state at position i. Slots from the last token's position onward
            hold arbitrary values.
        lengths: ``int32[B]``, the sequence lengths. The last token's state is not known yet.
    """

    cache: KVCache
    lengths: Array


@pytree
class _Drafting:
    """A block's predictions.

    Attributes:
        read: the state before the block.
        hidden: ``[B, K, E]``, the states of the rows that predict the draft tokens.
        logits: ``float32[B, K, D]``, these rows' logits without any correction. With a candidate selector, they are
            ``float32[B, K, C]``.
        candidates: ``int32[B, K, C]``, the tokens that these logits are for; None without a candidate selector.
        markov: ``[B, S, r]``, the Markov head's states at the last level.
        acceptance: ``float32[B, S]``, the confidence head's estimates for the tokens after the last level; None without
            a confidence head.
    """

    read: _Read
    hidden: Array
    logits: Array
    candidates: Array | None
    markov: Array
    acceptance: Array | None = None


@pytree
class BlockDrafter(AutoregressiveDrafter[_Read, _Drafting]):
    """A drafter that runs its layers once per draft (see `jspec.drafters.heads.block_module`).

    Without a Markov head, a draft token's distribution depends only on its depth, as in DFlash. With a Markov head, it
    also depends on the draft tokens before it, at the cost of a product of small matrices per token, as in DSpark. With
    a candidate selector, as in DFlash2, it depends on the draft token before it, and only a few tokens per depth can be
    drafted. All these distributions are exactly known, so every acceptance rule applies, and `jspec.TreeDrafter` and
    `jspec.DynamicTreeDrafter` draft trees from a single block.

    Attributes:
        block: a `jspec.drafters.heads.block_module.Block`.
    """

    block: Block

    @classmethod
    def load(cls, path: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Self:
        """Load a block from config.json and safetensors, in the layout of DFlash, JetSpec, DeepSpec or speculators.

        Args:
            path: a local directory, or a Hugging Face repo id.
            target: the `jspec.Llama` that the drafter was trained for. If given, sizes are checked immediately. The
                target is required if config.json does not specify which layers the drafter reads. It is also required
                if the files have a reduced vocabulary without an output head: rows of the target's output head are
                then used.
            dtype: the dtype of weights, activations and cache. Same as in `jspec.load`.

        Raises:
            convert.CheckpointError: the files are not those of a block drafter, or are damaged, or are pickles. The
                message says what was found and expected.
            ValueError: the drafter was made for a target with different sizes.
        """
        return cls(block_weights.load(path, target, dtype))

    def quantize(self, kind: str = "int8", activation_bits: int = 24) -> Self:
        """Return a copy with quantised matrices, including embeddings and tables. See `jspec.quantize`.

        Draft tokens are drawn from the quantised block's own distribution, so the output stays exact. The copy cannot
        be saved.

        Args:
            kind: same as in `jspec.quantize`.
            activation_bits: same as in `jspec.load`.

        Raises:
            ValueError: under the same conditions as `jspec.quantize`.
        """
        block = quantized_copy(self._block, kind, self._block.dtype, activation_bits)
        block.quantized = kind
        return type(self)(block)

    def save(self, path: str | Path, format: str = "speculators", own_head: bool = True) -> Path:
        """Write config.json, with every flag, and model.safetensors to a new directory.

        Args:
            format: "dflash", "jetspec", "dflash2", "deepspec", or "speculators" (read by vLLM).
            own_head: whether to write the drafter's output head, if it has one. Pass False only if its rows are rows
                of the target's output head. Only jspec reads such files.

        Raises:
            convert.CheckpointError: programs that read this format would compute results that differ from the
                drafter's, or `path` exists or cannot be written.
            ValueError: the drafter is quantised.
        """
        return block_weights.save(self._block, path, format, own_head)

    @property
    def _block(self) -> Block:
        if not isinstance(self.block, Block):
            raise TypeError(
                f"block is of type {type(self.block).__name__}; pass a jspec.drafters.heads.block_module.Block."
            )
        return self.block

    @property
    def vocab_size(self) -> int:
        return self._block.config.body.vocab_size

    @property
    def features(self) -> tuple[int, ...]:
        return self._block.config.features

    @property
    def max_chain_length(self) -> int:
        return self._block.config.num_draft_tokens

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _Read:
        """Read the target's states at the prompts' tokens.

        Raises:
            ValueError: the drafter was made for a target with different sizes.
        """
        block, batch = self._block, len(tokens)
        features, target = signals.states()
        check_target_of(block.config, target.config)
        narrow = block.new_cache(batch, tokens.shape[1])
        read = block.read(features, narrow, jnp.zeros(batch, jnp.int32), target)
        room = block.new_cache(batch, whole_tiles(num_slots + block.config.block_size))  # with slots for a block
        return _Read(insert_prefix(room, read), signals.known_lengths)

    def read(self, state: _Read, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> _Read:
        """Read the next piece of the sequence. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        features, target = signals.states()
        cache = self._block.read(features, state.cache, start, target)
        return _Read(cache, where_read(count, start + count + 1, state.lengths))

    def begin(self, state: _Read, context: Context, tree: Tree) -> tuple[Array, _Drafting]:
        """Run the block. Return the logits after the sequence so far."""
        block, target, depth = self._block, context.target.model, tree.max_depth
        config = block.config
        if depth > config.num_draft_tokens:
            raise ValueError(
                f"A block of {config.block_size} rows drafts at most {config.num_draft_tokens} consecutive tokens; got "
                f"{depth}: draft fewer."
            )
        first = 0 if config.drafts_from_first else 1
        # The rows of a bidirectional block attend to later rows, so all rows run, as in training.
        rows = first + depth if config.causal else config.block_size
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)
        tokens = jnp.pad(last, ((0, 0), (0, rows - 1)), constant_values=config.mask_id)
        hidden, cache = block.forward(tokens, state.cache, context.lengths - 1, target)
        hidden = hidden[:, first : first + depth]
        logits = block.logits(hidden, target)
        candidates, selector, head = None, block.candidate_selector, block.markov_head
        if selector is not None:
            logits, candidates = selector.candidates(logits)
        markov = hidden[:, :1, :0] if head is None else head.initial(len(last))
        carry = _Drafting(_Read(cache, context.lengths), hidden, logits, candidates, markov)
        logits, carry = self.extend(carry, last, Level(0), context)
        return logits[:, 0], carry

    def extend(self, carry: _Drafting, tokens: Array, level: Level, context: Context) -> tuple[Array, _Drafting]:
        block, markov = self._block, carry.markov
        logits, hidden = at_depth(carry.logits, level, tokens), at_depth(carry.hidden, level, tokens)
        if block.candidate_selector is not None and carry.candidates is not None:
            candidates = at_depth(carry.candidates, level, tokens)
            logits = block.candidate_selector(logits, candidates, tokens, hidden)
        if block.markov_head is not None:
            correction, markov = block.markov_head(level.of_parents(markov), tokens, hidden)
            logits = logits + correction
        confidence = block.confidence(hidden, tokens)
        acceptance = None if confidence is None else jax.nn.sigmoid(confidence)
        return block.spread(logits), dataclasses.replace(carry, markov=markov, acceptance=acceptance)

    def acceptance(self, carry: _Drafting, logits: Array) -> Array:
        """Return the confidence head's estimate; without this head, that of `AutoregressiveDrafter.acceptance`."""
        return super().acceptance(carry, logits) if carry.acceptance is None else carry.acceptance[:, 0]

    def end(self, carry: _Drafting) -> _Read:
        return carry.read

    def commit(self, state: _Read, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _Read:
        """Read the target's states at the last token and the accepted tokens."""
        features, target = signals.states()
        cache = self._block.read(at_path(features, verdict), state.cache, state.lengths - 1, target)
        return _Read(cache, state.lengths + verdict.num_accepted + 1)
