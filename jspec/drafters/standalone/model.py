"""A separate, smaller language model as the drafter, with its own KV cache."""

import dataclasses
from pathlib import Path
from typing import Self

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jspec.core.tree import Branches, Level, Tree
from jspec.core.types import Draft, PyTree, Verdict, pytree
from jspec.drafters.base import Context, Drafter, declared, kind_of, own_tree
from jspec.drafters.capabilities import embeddings_of, features_of, num_top_tokens_of
from jspec.drafters.draft_vocabulary import checked_vocabulary, draft_ids_of, spread_logits
from jspec.drafters.drafts import last_tokens
from jspec.drafters.duck_typed import adapted
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.autoregressive import AutoregressiveDrafter
from jspec.models.kv_cache import KVCache, keep, prefill
from jspec.models.language_model import LanguageModel, vocab_size_of
from jspec.models.llama import Llama, with_outputs
from jspec.models.load import load, save


@pytree
class ModelDrafter(AutoregressiveDrafter[KVCache, KVCache]):
    """A drafter that runs a draft model (Leviathan et al. 2023, section 2).

    Attributes:
        model: any `jspec.Llama` with the target's vocabulary. With a reduced vocabulary, its output head holds only the
            tokens that can be drafted.
        draft_ids: each token's index in a reduced output head, ``int32[V]``, as `with_vocabulary` sets it; None for the
            whole vocabulary.
    """

    model: Llama
    draft_ids: Array | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def with_vocabulary(cls, model: Llama, tokens: ArrayLike) -> Self:
        """Return a drafter that drafts only the given tokens and copies only their part of the output head.

        In the draft, all other tokens have probability 0. The output distribution does not change. The acceptance rate
        falls by at most the target's probability of the other tokens. `jspec.drafters.frequent_tokens` chooses tokens.

        Args:
            model: the draft model, packed or not. To draft in int8 or int4, quantise it first.
            tokens: the distinct token ids ``int[D]`` that can be drafted. Without the EOS ids, the drafter never
                drafts the end of a text.

        Raises:
            TypeError: `model` is not a model.
            ValueError: there are no tokens, a token occurs twice, token ids are outside the vocabulary, or the
                vocabulary of `model` is already reduced.
        """
        size = vocab_size_of("model", model)
        if model.head.num_tokens != size:
            raise ValueError(
                f"The model's output head holds {model.head.num_tokens} of {size} tokens, so its vocabulary is already "
                "reduced; pass the original model."
            )
        tokens = checked_vocabulary(tokens, size)
        return cls(with_outputs(model, tokens), draft_ids=draft_ids_of(tokens, size))

    @classmethod
    def load(cls, path: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Self:
        """Load the model from a local directory or a Hugging Face repo id with `jspec.load`; `target` is not used."""
        return cls(load(path, dtype))

    def save(self, path: str | Path, tokenizer: str | Path | None = None) -> Path:
        """Write the model to a new Hugging Face directory: config.json and model.safetensors.

        Args:
            tokenizer: a directory, GGUF file or Hugging Face repo id whose tokenizer files are copied, such as the
                target's.

        Raises:
            convert.CheckpointError: `path` exists or cannot be written, or no config.json can describe the model
                (Qwen2).
            ValueError: the model was quantised by jspec, or its vocabulary is reduced.
        """
        if self.draft_ids is not None:
            raise ValueError(
                "The drafter has a reduced vocabulary, which a Hugging Face directory cannot hold; save the original "
                "model, and reduce its vocabulary after loading."
            )
        return save(self.model, path, tokenizer)

    @property
    def vocab_size(self) -> int:
        return vocab_size_of("model", self.model)

    @property
    def max_positions(self) -> int:
        return self.model.config.max_position_embeddings

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> KVCache:
        """Prefill the prompts into a cache with `num_slots` slots."""
        return prefill(self.model, tokens, num_slots)

    def read(self, state: KVCache, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> KVCache:
        """Prefill the next piece of the sequence. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        return self.model.forward(tokens[:, :-1], state, start)[1]

    def begin(self, state: KVCache, context: Context, tree: Tree) -> tuple[Array, KVCache]:
        """Read all tokens that may be unread, in one pass.

        If the whole draft was accepted, the cache lacks the last draft token, which was drawn but never read. Reading
        it here costs a few additional rows. A separate pass would read all weights again.
        """
        block, start, last = last_tokens(context.tokens, context.lengths, context.unread)
        # A row shorter than the block writes slots past its end. Later steps overwrite them before they are read.
        hidden, cache = self.model.forward(block, state, start)
        return self._logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0], cache

    def extend(self, carry: KVCache, tokens: Array, level: Level, context: Context) -> tuple[Array, KVCache]:
        start = level.start(context.lengths)
        hidden, cache = self.model.forward(tokens, carry, start, **Branches.argument(level.branches))
        return self._logits(hidden), cache

    def _logits(self, hidden: Array) -> Array:
        """Return ``float32[B, S, V]``, with -inf for tokens that cannot be drafted."""
        logits = self.model.logits(hidden)
        return logits if self.draft_ids is None else spread_logits(logits, self.draft_ids)

    def end(self, carry: KVCache) -> KVCache:
        return carry

    def keep(self, state: KVCache, start: Array, path: Array) -> KVCache:
        return keep(state, start, path)

    def commit(self, state: KVCache, draft: Draft, verdict: Verdict, signals: TargetSignals) -> KVCache:
        """Return `state` unchanged: the row's length determines which cache slots are valid."""
        return state


def as_drafter(draft: object) -> Drafter[PyTree]:
    """Convert a caller's draft to a `Drafter`: wrap a model in a `ModelDrafter`, and any other object in an adapter.

    Raises:
        TypeError: `draft` is a class.
        ValueError: `draft` is the model of a drafter with a reduced vocabulary, and works only within that drafter.
    """
    if isinstance(draft, type):
        raise TypeError(f"draft is the class {draft.__name__}; pass an instance of it, such as {draft.__name__}(...).")
    if isinstance(draft, Llama) and draft.head.num_tokens != draft.config.vocab_size:
        raise ValueError(
            f"The draft's output head holds {draft.head.num_tokens} of {draft.config.vocab_size} tokens; pass the "
            "drafter that ModelDrafter.with_vocabulary returned instead of its model."
        )
    return ModelDrafter(draft) if isinstance(draft, Llama) else adapted(draft)


def positions(target: LanguageModel, draft: object) -> int:
    """Return the largest number of tokens that a sequence may have, including the prompt."""
    longest, limit = target.config.max_position_embeddings, declared(as_drafter(draft)).max_positions
    return longest if limit is None else min(longest, limit)


def as_part(name: str, draft: object, forwards_signals: bool = False) -> Drafter[PyTree]:
    """Convert `draft` to a drafter that can be part of a combined chain drafter. Error messages call it `name`.

    Args:
        forwards_signals: whether the combined drafter forwards the values that it receives from the target.

    Raises:
        TypeError: `draft` drafts a tree, or requests values from the target that it would not receive.
    """
    drafter = as_drafter(draft)
    if own_tree(drafter) is not None:
        raise TypeError(
            f"{name} is of type {kind_of(drafter)}, which drafts a tree, but only chains can be combined; "
            "pass a chain drafter, such as the one that draws the tree's tokens."
        )
    embeds = embeddings_of(drafter) is not None
    if embeds or (not forwards_signals and (features_of(drafter) or num_top_tokens_of(drafter))):
        raise TypeError(
            f"{name} is of type {kind_of(drafter)}, which needs values other than tokens from the target, but a "
            f"{'combined drafter' if embeds else 'CascadeDrafter'} does not forward these values; use {name} by itself"
            f"{'' if embeds else ', or in a FallbackDrafter'}."
        )
    return drafter
