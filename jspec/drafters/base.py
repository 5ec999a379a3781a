# pyright: strict, reportUnknownMemberType=false
"""The drafter contract: three methods over pytrees.

A drafter is any pytree with these three methods. Its `propose` pairs every token with the distribution it was drawn
from. As long as that holds, a drafter changes only the speed of decoding and never the output distribution.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.probs import sample_with_noise
from jspec.core.row_ops import prefix_mask, slice_rows
from jspec.core.sampling import LogitsTransforms, TokenCounts
from jspec.core.tree import DynamicTree, Tree
from jspec.core.types import Draft, Verdict, longer_by_padding, same_but_for_padding
from jspec.drafters.capabilities import embeddings_of
from jspec.drafters.draft_length import DraftLength

State = TypeVar("State")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["model", "cache"], meta_fields=["unread"])
@dataclasses.dataclass(frozen=True)
class TargetView:
    """The model that will verify the draft, and its KV cache.

    Attributes:
        model: the target, or the middle model within a cascade.
        cache: the KV cache of `model`, for reading only: a drafter's writes to it are discarded. It holds the sequence
            so far, except its last `unread` tokens. Later slots hold arbitrary values.
        unread: the number of trailing tokens missing from `cache`. It is at least 1, because the newest token has been
            sampled but not yet read.
    """

    model: Any
    cache: Any
    unread: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "noise", "transforms", "token_counts", "target", "budget", "length_state"],
    meta_fields=["vocab_size", "unread", "draft_length"],
)
@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs of a draft.

    Attributes:
        tokens: ``int32[B, L]``, the prompt and the tokens generated so far; row b is valid up to ``lengths[b]``.
        lengths: ``int32[B]``, the number of valid tokens in each row.
        noise: ``float32[B, K, C, 2, W]``, the random numbers that draw the draft tokens, fresh in every round. See
            `draw`. C is the largest number of draft tokens at one depth, which is 1 in a chain.
        transforms: the sampling transforms of the draft's distribution.
        token_counts: the counts that penalties use, or None if there are no penalties.
        target: the model that will verify the draft.
        vocab_size: V of the target.
        unread: the number of trailing tokens that a drafter's own cache may lack. It is 2 if the drafter proposes every
            draft itself. The two are its last draft token, drawn but not read, and the token that the target sampled
            after it.
        budget: ``int32[B]``, the number of tokens to draft in each row, or None for the full number. Tokens beyond it
            are cut off.
        draft_length: the policy that decides whether to draft another token, or None (`jspec.drafters.draft_length`).
        length_state: the state of `draft_length`.
    """

    tokens: Array
    lengths: Array
    noise: Array
    transforms: LogitsTransforms
    token_counts: TokenCounts | None
    target: TargetView
    vocab_size: int
    unread: int = 2
    budget: Array | None = None
    draft_length: DraftLength | None = None
    length_state: Any = None

    def draw(self, k: Array | int, probs: Array) -> Array:
        """Draw draft token k, ``int32[B]``, from its distribution ``probs[B, V]``. Use each k once per round."""
        return sample_with_noise(self.noise[:, k, 0], probs)


class Drafter(Protocol[State]):
    """A source of draft tokens. `state` is the drafter's own pytree; its shapes stay the same from round to round.

    Optional attributes declare what else a drafter offers or requests:

    `tree`, a `jspec.Tree`, makes the drafter propose this tree instead of a chain. A node's distribution may depend
    only on the nodes before it on its branch and on its earlier siblings. If siblings are drawn independently from one
    distribution, set `replacement` to True, because some rules require it.

    `features`, a tuple of F ints, requests F of the target's hidden states. The int i requests the input of layer i;
    the number of layers, or -1, requests the output of the last layer. `init` then also takes the prompts'
    ``features [B, P, F, E]``, their ``lengths int32[B]`` and the model ``target``. `commit` then also takes
    ``features [B, K + 1, F, E]``, at the same tokens as ``hidden``, and ``target``.

    `num_likeliest`, an int n, makes `commit` also take ``likeliest int32[B, K + 1, n]``: the verifying model's n most
    likely tokens after each token of ``hidden``. They are ranked by its own logits, the most likely first. If the
    vocabulary has V < n tokens, there are V of them.

    `read` lets the drafter prefill a sequence in pieces, as `jspec.engine.Engine` does
    (`jspec.drafters.chunked_prefill.prefill_chunk`). Without it, a drafter's own `init` receives each prompt whole,
    as soon as the prompt is complete.

    `embeddings`, ``float[M, E]``, lets the drafter propose ids from V to V + M - 1 in places that it does not draft.
    The target reads row i of `embeddings` in place of token V + i. The target's state there, after the branch so far,
    is in ``hidden`` as for any other token.
    """

    @property
    def vocab_size(self) -> int | None:
        """V, which must be the target's, or None for any. In a token-by-token drafter it may differ by padding."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the drafter supports, or None if it has no limit."""
        ...

    def init(self, tokens: Array, num_slots: int) -> State:
        """Return the state before the first round.

        ``tokens[B, P]`` are the prompts, and ``num_slots`` is an upper bound on all positions.
        """
        ...

    def propose(self, state: State, context: Context, num_draft_tokens: int) -> tuple[Draft, State]:
        """Return a draft of `num_draft_tokens` tokens, from position ``context.lengths`` on, and the new state.

        All token ids are below ``context.vocab_size``.
        """
        ...

    def commit(self, state: State, draft: Draft, verdict: Verdict, hidden: Array) -> State:
        """Return the state after a draft has been verified.

        ``hidden[B, K + 1, E]`` are the verifying model's hidden states over the draft. For a tree they are the states
        after node 0 and after every other node.

        In a combined drafter, the draft may come from another part. In a `jspec.MultiDrafter`, a part with `features`
        receives the accepted path as a chain, whichever part proposed it; the chain ends with that path.

        If draft lengths vary, the values after a row's last token with a distribution are arbitrary. Do not learn from
        them.
        """
        ...


class AskingDrafter(Protocol):
    """A `Drafter` whose `init` or `commit` takes more arguments because it has `features` or `num_likeliest`."""

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def max_positions(self) -> int | None: ...

    @property
    def init(self) -> Callable[..., Any]: ...

    def propose(self, state: Any, context: Context, num_draft_tokens: int) -> tuple[Draft, Any]: ...

    @property
    def commit(self) -> Callable[..., Any]: ...


def at_most(context: Context, num_draft_tokens: int) -> Context:
    """Return `context` for one part of a combined drafter, with a budget of at most `num_draft_tokens`."""
    if context.budget is None:
        return context
    return dataclasses.replace(context, budget=jnp.minimum(context.budget, num_draft_tokens))


def as_draft(drafter: Any, draft: object, context: Context, num_draft_tokens: int) -> Draft:
    """Return the draft that `drafter` proposed, converted to the program's dtypes.

    A token loses its distribution if it is beyond the row's budget or not `valid`. So does an id outside the
    vocabulary, which jspec's own drafters cannot propose. Such tokens do not count as drafted.

    Raises, while the program is traced:
        TypeError: the proposal is not a draft.
        ValueError: its shapes differ from those requested.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose must return (jspec.drafters.Draft, state); got ({type(draft).__name__}, state).")
    tree = tree_of(drafter, num_draft_tokens)
    if not ((draft.tree is None and tree.is_chain) or _alike(draft.topology, tree)):
        raise ValueError(
            f"{type(drafter).__name__} proposed {draft.topology}; expected {tree}, because every draft must have "
            "the drafter's `tree` (a chain if it has none)."
        )
    if draft.valid is None and draft.probs is None:
        raise ValueError(
            f'{type(drafter).__name__} proposed tokens without distributions; give probs, or valid for "coupled" alone.'
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
        embeddings = embeddings_of(drafter)
        readable = context.vocab_size + (0 if embeddings is None else len(embeddings))
        read = jnp.where(is_out_of_vocab(draft.tokens, readable), 0, draft.tokens)
        draft = mask_draft(draft, ~is_out_of_vocab(draft.tokens, context.vocab_size), read)
    return draft


def _alike(tree: Tree | DynamicTree, other: Tree | DynamicTree) -> bool:
    """Return whether two trees are equal. Two dynamic trees only need the same size and depth."""
    if isinstance(tree, DynamicTree) and isinstance(other, DynamicTree):
        return (tree.size, tree.max_depth) == (other.size, other.max_depth)
    return tree == other


def own_tree(drafter: Any) -> Tree | DynamicTree | None:
    """Return a tree drafter's tree, or None for a chain drafter."""
    tree = getattr(drafter, "tree", None)
    return tree if isinstance(tree, Tree | DynamicTree) else None


def tree_of(drafter: Any, num_draft_tokens: int) -> Tree | DynamicTree:
    """Return the shape of a drafter's drafts: its `tree`, or a chain if it has none."""
    return own_tree(drafter) or Tree.chain(num_draft_tokens)


def as_tree(tree: Any) -> Tree:
    """Return `tree`, numbered by depth.

    Raises:
        TypeError: `tree` is not a `jspec.Tree`.
        ValueError: `tree` has no draft tokens.
    """
    if not isinstance(tree, Tree):
        raise TypeError(
            f"tree is of type {type(tree).__name__}; pass a jspec.Tree, such as jspec.Tree.branching((3, 2, 1))."
        )
    if not tree.size:
        raise ValueError("tree has no draft tokens; give it at least one, or decode with jspec.generate.")
    return tree.by_depth()


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
    """Keep draft tokens where ``kept[B, K]`` is True; replace the others by `otherwise`, without distributions."""
    probs = None if draft.probs is None else jnp.where(kept[..., None], draft.probs, 0)
    valid = None if draft.valid is None else draft.valid & kept
    return Draft(jnp.where(kept, draft.tokens, otherwise), probs, draft.tree, valid)


def shared_vocabulary(drafter: str, *sizes: int | None) -> int | None:
    """Return the vocabulary size that the parts of `drafter` share: the smallest, if others exceed it only by padding.

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
    """Return logits ``[..., V]`` from logits whose vocabulary differs from V only by padding.

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


def is_user_defined(drafter: Drafter[Any] | None) -> bool:
    """Return whether `drafter` defines `propose` outside jspec; `AutoregressiveDrafter.propose` is jspec's own."""
    if drafter is None:
        return False
    home = type(drafter).propose.__module__ or ""  # code that was run from a string has no module
    return home.split(".")[0] != __name__.split(".")[0]


class Stateless:
    """The `init` and `commit` of a drafter that keeps no state between rounds."""

    # Not typed as (), because an `AutoregressiveDrafter` may have a state.
    def init(self, tokens: Array, num_slots: int) -> Any:
        """Return an empty state."""
        return ()

    def commit(self, state: Any, draft: Draft, verdict: Verdict, hidden: Array) -> Any:
        """Return `state` unchanged."""
        return state


def last_tokens(tokens: Array, lengths: Array, before: int, after: int = 0) -> tuple[Array, Array, Array]:
    """Return the tokens around the end of each row: its last `before` tokens and the `after` tokens that follow.

    Returns:
        ``int32[B, before + after]``; the position ``int32[B]`` of the first of them, 0 in a row that is shorter than
        `before`; and the index ``int32[B]`` of the row's last token among them.
    """
    before = min(before, tokens.shape[1] - after)  # nested fallbacks request more than a short sequence has
    start = jnp.maximum(lengths - before, 0)
    return slice_rows(tokens, start, before + after), start, lengths - 1 - start
