"""Helpers for drafters: checking and masking drafts, fitting padded vocabularies, and slicing recent tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.row_ops import prefix_mask, slice_rows
from jspec.core.tree import DynamicTree, Tree
from jspec.core.types import Draft, longer_by_padding, same_but_for_padding
from jspec.drafters.base import Context, declared, is_user_defined, kind_of, tree_of


def at_most(context: Context, num_draft_tokens: int) -> Context:
    """Return `context` for one part of a combined drafter, with a budget of at most `num_draft_tokens`."""
    if context.budget is None:
        return context
    return dataclasses.replace(context, budget=jnp.minimum(context.budget, num_draft_tokens))


def as_draft(drafter: object, draft: object, context: Context, num_draft_tokens: int) -> Draft:
    """Return the draft that `drafter` proposed, converted to the program's dtypes.

    A token loses its distribution if it is beyond the row's budget, not `valid`, or outside the vocabulary (jspec's own
    drafters never propose such an id). Tokens without distributions do not count as drafted.

    Raises, while the program is traced:
        TypeError: the proposal is not a draft.
        ValueError: its shapes differ from those requested.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose must return (jspec.drafters.Draft, state); got ({type(draft).__name__}, state).")
    tree = tree_of(drafter, num_draft_tokens)
    if not ((draft.tree is None and tree.is_chain) or _alike(draft.topology, tree)):
        raise ValueError(
            f"{kind_of(drafter)} proposed {draft.topology}; expected {tree}, because every draft must have "
            "the drafter's `tree` (a chain if it has none)."
        )
    if draft.valid is None and draft.probs is None:
        raise ValueError(
            f'{kind_of(drafter)} proposed tokens without distributions; set probs, or set valid and use "coupled".'
        )
    shape = [context.lengths.size, tree.size]
    if draft.valid is not None and (list(draft.valid.shape) != shape or draft.valid.dtype != bool):
        got = f"{draft.valid.dtype}{list(draft.valid.shape)}"
        raise ValueError(f"The drafter proposed a draft with valid {got}; expected bool{shape}.")
    tokens = list(draft.tokens.shape)
    probs = [*shape, context.vocab_size] if draft.probs is None else list(draft.probs.shape)
    if tokens != shape or probs != [*shape, context.vocab_size] or not jnp.issubdtype(draft.tokens.dtype, jnp.integer):
        raise ValueError(
            f"The drafter proposed tokens {draft.tokens.dtype}{tokens} with distributions {probs}; expected "
            f"integers {shape} with distributions {[*shape, context.vocab_size]}."
        )
    # If 64-bit types are enabled, a user's arrays may be wider than the program's.
    probs = None if draft.probs is None else draft.probs.astype(jnp.float32)
    draft = Draft(draft.tokens.astype(jnp.int32), probs, draft.topology, draft.valid)
    if draft.valid is not None:
        draft = mask_draft(draft, draft.valid, draft.tokens)
    if context.budget is not None:
        draft = mask_draft(draft, prefix_mask(context.budget, num_draft_tokens))
    if is_user_defined(drafter):
        embeddings = declared(drafter).embeddings
        readable = context.vocab_size + (0 if embeddings is None else len(embeddings))
        read = jnp.where(is_out_of_vocab(draft.tokens, readable), 0, draft.tokens)
        draft = mask_draft(draft, ~is_out_of_vocab(draft.tokens, context.vocab_size), read)
    return draft


def _alike(tree: Tree | DynamicTree, other: Tree | DynamicTree) -> bool:
    """Return whether two trees are equal. Two dynamic trees only need the same size and depth."""
    if isinstance(tree, DynamicTree) and isinstance(other, DynamicTree):
        return (tree.size, tree.max_depth) == (other.size, other.max_depth)
    return tree == other


def one_hot_draft(tokens: Array, guessed: Array, context: Context, tree: Tree | None = None) -> Draft:
    """Return a draft of ``tokens[B, K]`` that the sequence so far fully determines.

    The distributions are one-hot, or all zeros where ``guessed[B, K]`` is False.
    """
    probs = jax.nn.one_hot(tokens, context.vocab_size, dtype=jnp.float32)
    return Draft(tokens, probs * guessed[..., None].astype(probs.dtype), tree)


def is_out_of_vocab(tokens: Array, vocab_size: int) -> Array:
    """Return ``bool[B, K]``: whether each token is outside a vocabulary of this size."""
    return (tokens < 0) | (tokens >= vocab_size)


def mask_draft(draft: Draft, kept: Array, otherwise: Array | int = 0) -> Draft:
    """Keep draft tokens where ``kept[B, K]`` is True; replace all others with `otherwise`, without distributions."""
    probs = None if draft.probs is None else jnp.where(kept[..., None], draft.probs, 0)
    valid = None if draft.valid is None else draft.valid & kept
    return Draft(jnp.where(kept, draft.tokens, otherwise), probs, draft.tree, valid)


def force_tokens(draft: Draft, forced: Array) -> Draft:
    """Return a chain with the tokens ``forced[B, K]``, where these are not negative, and without tokens after them.

    A forced token's distribution is one-hot, because it depends only on the tokens before it. Draft tokens after
    a forced token are dropped, because they were drawn given the tokens that it replaces.
    """
    is_forced = forced >= 0
    kept = mask_draft(draft, jnp.cumsum(is_forced, axis=1) == 0, forced)
    valid = None if kept.valid is None else kept.valid | is_forced
    if kept.probs is None:
        return Draft(kept.tokens, None, draft.tree, valid)
    one_hot = jax.nn.one_hot(forced, kept.probs.shape[-1], dtype=kept.probs.dtype)  # all zeros for -1
    return Draft(jnp.maximum(kept.tokens, 0), kept.probs + one_hot, draft.tree, valid)


def shared_vocabulary(drafter: str, *sizes: int | None) -> int | None:
    """Return the vocabulary size that the parts of `drafter` share: the smallest one if they differ only in padding.

    Raises:
        ValueError: the parts have different vocabularies.
    """
    known = sorted({size for size in sizes if size is not None})
    if not all(longer_by_padding(size, known[0]) for size in known[1:]):
        raise ValueError(
            f"{drafter} combines vocabularies of {' and '.join(map(str, known))} tokens; "
            "use drafters that share the target's tokenizer."
        )
    return known[0] if known else None


def fit_vocabulary(logits: Array, vocab_size: int) -> Array:
    """Return logits ``[..., V]`` from logits whose vocabulary size differs from V only because of padding.

    Padding in the draft's vocabulary holds no tokens and is cut off. Padding in the target's vocabulary gets -inf, so
    the draft never proposes it.

    Raises:
        ValueError: the vocabularies differ by more than padding.
    """
    if not same_but_for_padding(logits.shape[-1], vocab_size):
        raise ValueError(
            f"The draft's logits have {logits.shape[-1]} columns and the target's vocabulary has {vocab_size} "
            "tokens, which differ by more than padding; use a draft that shares the target's tokenizer."
        )
    logits = logits[..., :vocab_size]
    missing = vocab_size - logits.shape[-1]
    if not missing:
        return logits
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def last_tokens(tokens: Array, lengths: Array, before: int, after: int = 0) -> tuple[Array, Array, Array]:
    """Return the tokens around the end of each row: its last `before` tokens and the `after` tokens that follow.

    Returns:
        The tokens ``int32[B, before + after]``; the position ``int32[B]`` of the first one, 0 in a row shorter than
        `before`; and the index ``int32[B]`` of the row's last token among these tokens.
    """
    before = min(before, tokens.shape[1] - after)  # nested fallbacks may request more tokens than a row holds
    start = jnp.maximum(lengths - before, 0)
    return slice_rows(tokens, start, before + after), start, lengths - 1 - start
