"""Debug mode: a wrapper that checks each of a drafter's drafts against the contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jspec.core.probs import at_tokens
from jspec.core.tree import DynamicTree, Tree
from jspec.core.types import Draft, PyTree, Verdict, pytree
from jspec.drafters.base import Context, DraftSource, kind_of, own_tree
from jspec.drafters.capabilities import WrapperDrafter
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.drafts import as_draft, is_out_of_vocab
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals

_TOLERANCE = 1e-3


@pytree
class CheckedDrafter(WrapperDrafter[PyTree]):
    """A wrapper around `draft` that fails if a distribution is invalid or a token cannot come from its distribution.

    An all-zero distribution means that no token is drafted, so it passes. `jspec.speculative_generate` wraps its draft
    in this class if ``jax.enable_checks(True)`` is set (JAX_ENABLE_CHECKS=1). Each round then calls the host. When the
    caller waits for results, JAX raises a JaxRuntimeError that quotes the original error.
    """

    draft: DraftSource

    @property
    def tree(self) -> Tree | DynamicTree | None:
        return own_tree(self.draft)

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> PyTree:
        return self.inner.init(tokens, num_slots, signals)

    def read(self, state: PyTree, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> PyTree:
        return prefill_chunk(self.inner, state, tokens, start, count, signals)

    def propose(self, state: PyTree, context: Context, num_draft_tokens: int) -> tuple[Draft, PyTree]:
        draft, state = self.inner.propose(state, context, num_draft_tokens)
        held = as_draft(self, draft, context, num_draft_tokens)
        if held.probs is None:  # there is no distribution to check
            assert held.valid is not None, "as_draft rejects a draft that has neither"
            check = functools.partial(_check_ids, kind_of(self.draft), context.vocab_size)
            jax.debug.callback(check, held.tokens, held.valid)
            return draft, state
        drawn = jnp.where(is_out_of_vocab(held.tokens, context.vocab_size), 0, at_tokens(held.probs, held.tokens))
        sums, least = held.probs.sum(-1), held.probs.min(-1)
        check = functools.partial(_check, kind_of(self.draft), context.vocab_size)
        jax.debug.callback(check, held.tokens, sums, least, drawn)
        return draft, state

    def commit(self, state: PyTree, draft: Draft, verdict: Verdict, signals: TargetSignals) -> PyTree:
        return self.inner.commit(state, draft, verdict, signals)


def _check_ids(name: str, vocab_size: int, tokens: ArrayLike, guessed: ArrayLike) -> None:
    """Raise ValueError if a draft token is outside the vocabulary. This function runs on the host.

    `tokens` and `guessed` are ``[B, K]``: the tokens, and whether each of them is drafted.
    """
    tokens, guessed = np.asarray(tokens), np.asarray(guessed)
    for row, k in np.argwhere(guessed & ((tokens < 0) | (tokens >= vocab_size)))[:1]:
        raise ValueError(
            f"{name} drafted {tokens[row, k]} as token {k} of row {row}, outside the vocabulary of {vocab_size} "
            "tokens; draft the target's ids, or return an all-zero distribution to draft no token."
        )


def _check(name: str, vocab_size: int, tokens: ArrayLike, sums: ArrayLike, least: ArrayLike, drawn: ArrayLike) -> None:
    """Raise ValueError if a distribution is invalid or cannot produce its token. This function runs on the host.

    All arrays are ``[B, K]``: the tokens, the sums and the smallest entries of their distributions, and the tokens'
    probabilities.
    """
    tokens, sums, least, drawn = map(np.asarray, (tokens, sums, least, drawn))
    _check_ids(name, vocab_size, tokens, sums != 0)
    lawful = (np.abs(sums - 1) < _TOLERANCE) & (least >= 0) & (drawn > 0)
    for row, k in np.argwhere(~(lawful | ((sums == 0) & (least == 0))))[:1]:
        raise ValueError(
            f"{name} drafted token {k} of row {row} with a distribution that sums to {sums[row, k]:.6g}, has "
            f"a smallest entry of {least[row, k]:.3g}, and a probability of {drawn[row, k]:.3g} for the token; "
            "expected a sum of 1, no negative entry, and the distribution that the token was drawn from, or "
            "all zeros to draft no token."
        )
