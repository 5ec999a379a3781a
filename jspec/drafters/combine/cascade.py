"""Speculation within the draft: a small drafter drafts for a middle model, which drafts for the target."""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from jspec.acceptance.coupled import accept_coupled
from jspec.core.keys import positions_from
from jspec.core.row_ops import prefix_mask, slice_rows, write_rows
from jspec.core.sampling import TokenCounts, add_tokens, token_probs
from jspec.core.sharding import vary_like
from jspec.core.types import Draft, PyTree, Verdict, check_count, pytree
from jspec.drafters.base import Context, Drafter, DraftSource, TargetView
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.drafts import as_draft, fit_vocabulary, last_tokens, shared_vocabulary
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.model import ModelDrafter, as_part
from jspec.models.kv_cache import KVCache, prefill, whole_tiles
from jspec.models.language_model import vocab_size_of
from jspec.models.llama import Llama

_Caches = tuple[KVCache, PyTree]


@pytree
class _Progress:
    """An unfinished draft: ``counts[b]`` tokens, their distributions, and the fields of `Context` that they update."""

    counts: Array
    tokens: Array
    probs: Array
    token_counts: TokenCounts | None
    cache: KVCache
    small: PyTree


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["middle", "small"], meta_fields=["num_small_draft_tokens"]
)
@dataclasses.dataclass(frozen=True)
class CascadeDrafter(Drafter[_Caches]):
    """A drafter that proposes exactly the tokens of ``ModelDrafter(middle)``, with fewer passes of `middle`.

    Its rounds follow the rule "coupled" (`jspec.rules.Coupled`). `middle` draws every token with that token's noise.
    `small` drafts with the same noise, and affects only the number of passes. Every token therefore has the middle
    model's distribution (Leviathan et al. 2023, section 6, "hierarchical"; Chen et al. 2024, Cascade Speculative
    Drafting). `small` may itself be a cascade.

    Attributes:
        middle: a `jspec.Llama` with the target's vocabulary.
        small: any drafter, or a model.
        num_small_draft_tokens: the number of tokens that `small` drafts for each pass of `middle`.
    """

    middle: Llama
    small: DraftSource
    num_small_draft_tokens: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "small", as_part("small", self.small))
        check_count("num_small_draft_tokens", self.num_small_draft_tokens)

    @property
    def vocab_size(self) -> int | None:
        return shared_vocabulary(type(self).__name__, vocab_size_of("middle", self.middle), self._small.vocab_size)

    @property
    def max_positions(self) -> int:
        longest = self.middle.config.max_position_embeddings
        return min(longest, self._small.max_positions or longest)

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> _Caches:
        """Prefill both parts. Reserve slots for the tokens that the last pass of `middle` may read past the draft."""
        num_slots = whole_tiles(num_slots + self.num_small_draft_tokens + 1)
        return prefill(self.middle, tokens, num_slots), self._small.init(tokens, num_slots, NO_SIGNALS)

    @property
    def _small(self) -> Drafter[PyTree]:
        return cast(Drafter[PyTree], self.small)

    @property
    def parts(self) -> tuple[Drafter[PyTree], Drafter[PyTree]]:
        return ModelDrafter(self.middle), self._small

    def read(self, state: _Caches, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> _Caches:
        """Prefill the sequence's next piece with both parts. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        middle, small = (
            prefill_chunk(part, own, tokens, start, count, NO_SIGNALS)
            for part, own in zip(self.parts, state, strict=True)
        )
        return middle, small

    def propose(self, state: _Caches, context: Context, num_draft_tokens: int) -> tuple[Draft, _Caches]:
        """Run rounds of `small` and `middle` until every row has its full draft."""
        batch, spare = context.lengths.size, self.num_small_draft_tokens + 1
        progress = _Progress(
            counts=jnp.zeros(batch, jnp.int32),
            tokens=jnp.pad(context.tokens, ((0, 0), (0, spare))),
            probs=jnp.zeros((batch, num_draft_tokens + spare, context.vocab_size), jnp.float32),
            token_counts=context.token_counts,
            cache=state[0],
            small=state[1],
        )
        # Tokens past the draft are discarded, so any noise will do there.
        noise = jnp.pad(context.noise, ((0, 0), (0, spare), (0, 0), (0, 0), (0, 0)))
        # Run at least one round, even if the budget is 0: a row that is not read now might never be read completely.
        budget = num_draft_tokens if context.budget is None else jnp.clip(context.budget, 1, num_draft_tokens)
        inner = dataclasses.replace(context, noise=noise, budget=None, draft_length=None)
        progress = lax.while_loop(
            lambda progress: jnp.any(progress.counts < budget),
            lambda progress: self._round(progress, inner, num_draft_tokens),
            vary_like(progress, context.lengths),
        )
        tokens = slice_rows(progress.tokens, context.lengths, num_draft_tokens)
        return Draft(tokens, progress.probs[:, :num_draft_tokens]), (progress.cache, progress.small)

    def commit(self, state: _Caches, draft: Draft, verdict: Verdict, signals: TargetSignals) -> _Caches:
        """Return `state` unchanged: row lengths determine the valid cache slots, and `propose` has updated `small`."""
        return state

    def _round(self, progress: _Progress, context: Context, num_draft_tokens: int) -> _Progress:
        """Run one inner round. Drafts that are already complete do not change."""
        counts, k = progress.counts, self.num_small_draft_tokens
        lengths = context.lengths + counts
        noise = slice_rows(context.noise, counts, k + 1)
        # The tokens that the target may have added since the last draft are followed by a token from `middle`.
        inner = dataclasses.replace(
            context,
            tokens=progress.tokens,
            lengths=lengths,
            noise=noise,
            token_counts=progress.token_counts,
            target=TargetView(self.middle, progress.cache, context.unread),
            unread=context.unread + 1,
        )
        guess, small = self._small.propose(progress.small, inner, k)
        guess = as_draft(self._small, guess, inner, k)
        tokens = write_rows(progress.tokens, guess.tokens, lengths)
        block, start, last = last_tokens(tokens, lengths, context.unread, k)
        hidden, cache = self.middle.forward(block, progress.cache, start)
        hidden = jnp.take_along_axis(hidden, positions_from(last, k + 1)[..., None], axis=1)
        logits = fit_vocabulary(self.middle.logits(hidden), context.vocab_size)
        probs = token_probs(logits, context.transforms, progress.token_counts, guess.tokens)
        verdict = accept_coupled(noise[:, :, 0], guess, probs)
        tokens = write_rows(tokens, verdict.next_token[:, None], lengths + verdict.num_accepted)
        emitted = slice_rows(tokens, lengths, k + 1)
        gained = jnp.minimum(verdict.num_accepted + 1, num_draft_tokens - counts)
        kept = prefix_mask(gained, k + 1)
        return _Progress(
            counts=counts + gained,
            tokens=write_rows(progress.tokens, emitted, lengths),
            probs=write_rows(progress.probs, probs, counts),
            token_counts=None if progress.token_counts is None else add_tokens(progress.token_counts, emitted, kept),
            cache=cache,
            small=self._small.commit(small, guess, verdict, TargetSignals(hidden)),
        )
