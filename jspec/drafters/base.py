# pyright: strict, reportUnknownMemberType=false
"""The drafter contract: three functions over pytrees.

A drafter is any pytree with these three methods. What it returns from `propose` pairs every token with the law it was
drawn from; as long as that is true, nothing a drafter does can change the law of the text, only its speed.
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
    """The model that will verify the draft, and what it has read.

    Attributes:
        model: for a draft of the whole program the target; a middle model within a cascade.
        cache: its own, for reading: what a drafter writes into it is not kept. It holds the text so far without its
            last `unread` tokens; slots from there on hold anything.
        unread: at least 1, for the newest token has been drawn and not yet read.
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
    """What a drafter may look at.

    Attributes:
        tokens: ``int32[B, L]``, prompt and text so far; row b is valid up to ``lengths[b]``.
        lengths: ``int32[B]``.
        noise: ``float32[B, K, C, 2, W]``, of this round alone: what the drafted tokens are drawn with, see `draw`. C is
            the most guesses of one depth, 1 in a chain.
        transforms: the transforms the draft's law goes through.
        token_counts: what penalties look at, or None where there are none.
        target: the model that will verify the draft.
        vocab_size: V of the target.
        unread: how many of the last tokens a drafter's own cache may lack. With drafts of its own only it is 2: its
            last draft, which was drawn and not read, and the token that the target wrote after it.
        budget: ``int32[B]``, how many tokens each row is to get; None for all of them. More are cut off.
        draft_length: what decides whether to go on after a token, or None (`jspec.drafters.draft_length`).
        length_state: what that remembers.
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
        """Draft token k, ``int32[B]``, drawn from its law ``probs[B, V]``; each k once a round."""
        return sample_with_noise(self.noise[:, k, 0], probs)


class Drafter(Protocol[State]):
    """Guesses tokens. `state` is the drafter's own pytree; its shapes stay the same from round to round.

    One that has a `tree`, a `jspec.Tree`, drafts that in place of a chain. The law of a node may depend on the nodes
    before it on its branch, and on its elder siblings, alone. If it does not depend on these, siblings being drawn
    independently from one law, an attribute `replacement` that is True says so, for rules which need that.

    One that has `features`, a tuple of F ints, reads states of the target: i names what enters its layer i; the number
    of its layers, or -1, what leaves the last. Its `init` is told ``features [B, P, F, E]`` of the prompts, their
    ``lengths int32[B]`` and the ``target``, the model; its `commit` ``features [B, K + 1, F, E]`` where ``hidden`` is,
    and the ``target``.

    One that has `num_likeliest`, an int n, is told more in `commit`: ``likeliest int32[B, K + 1, n]``, the judging
    model's likeliest tokens where ``hidden`` is, by its own logits, the likeliest first (of a vocabulary of V < n
    tokens V).

    One that has `read` can be given texts in pieces, as `jspec.engine.Engine` does
    (`jspec.drafters.late_reading.read_on`); of one that has not, and an `init` of its own, `init` is called with all of
    a prompt as soon as it is there.

    One that has `embeddings`, ``float[M, E]``, may draft ids from V to V + M - 1 where it has no guess: in place of
    token V + i the target reads row i of them. What it makes of that, behind its branch, is in ``hidden`` as of any
    other.
    """

    @property
    def vocab_size(self) -> int | None:
        """V, which must be the target's, or None for any; drawing token by token, the target's but for padding."""
        ...

    @property
    def max_positions(self) -> int | None:
        """The longest text it can guess for, or None for any."""
        ...

    def init(self, tokens: Array, num_slots: int) -> State:
        """The state before the first round: ``tokens[B, P]`` are the prompts, ``num_slots`` bounds every position."""
        ...

    def propose(self, state: State, context: Context, num_draft_tokens: int) -> tuple[Draft, State]:
        """A draft of `num_draft_tokens` tokens, below ``context.vocab_size``, for positions ``context.lengths ..``."""
        ...

    def commit(self, state: State, draft: Draft, verdict: Verdict, hidden: Array) -> State:
        """Learn what became of the draft; ``hidden[B, K + 1, E]`` are the judging model's states over it (of a
        tree behind node 0 and every guess).

        Within a combination the draft may be another's. In a `jspec.MultiDrafter` one that reads `features` is told of
        the accepted path as of a chain that ends there, whosever it is.

        Where drafts vary in length, what comes after a row's last token with a law is arbitrary: do not learn from it.
        """
        ...


class AskingDrafter(Protocol):
    """A `Drafter` whose `init` or `commit` is told more, for it has `features` or `num_likeliest`."""

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
    """`context` for a part of a drafter, which is asked for no more tokens than these."""
    if context.budget is None:
        return context
    return dataclasses.replace(context, budget=jnp.minimum(context.budget, num_draft_tokens))


def as_draft(drafter: Any, draft: object, context: Context, num_draft_tokens: int) -> Draft:
    """What `drafter` has proposed, in the program's dtypes, without the laws of tokens beyond a row's budget.

    Nor those of tokens that are not `valid`, nor of ids outside the vocabulary, which drafters of jspec cannot have:
    they are no guess.

    Raises, while the program is traced:
        TypeError: it is no draft.
        ValueError: its shapes are not those that were asked for.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose must return (jspec.drafters.Draft, state); got {type(draft).__name__} first.")
    tree = tree_of(drafter, num_draft_tokens)
    if not ((draft.tree is None and tree.is_chain) or _alike(draft.topology, tree)):
        raise ValueError(f"{type(drafter).__name__} proposed {draft.topology}, and has said {tree}; a drafter's "
                         "`tree` is that of every draft.")  # fmt: skip
    if draft.valid is None and draft.probs is None:
        raise ValueError(f"{type(drafter).__name__} proposed tokens without laws; give probs, or valid for the rule "
                         '"coupled" alone.')  # fmt: skip
    shape = [context.lengths.size, tree.size]
    if draft.valid is not None and (list(draft.valid.shape) != shape or draft.valid.dtype != bool):
        got = f"{draft.valid.dtype}{list(draft.valid.shape)}"
        raise ValueError(f"The drafter proposed valid {got}; expected bool{shape}.")
    tokens = list(draft.tokens.shape)
    probs = [*shape, context.vocab_size] if draft.probs is None else list(draft.probs.shape)
    if tokens != shape or probs != [*shape, context.vocab_size] or not jnp.issubdtype(draft.tokens.dtype, jnp.integer):
        raise ValueError(f"The drafter proposed tokens {draft.tokens.dtype}{tokens} with laws {probs}; expected "
                         f"integers {shape} with laws {[*shape, context.vocab_size]}.")  # fmt: skip
    # With 64-bit types enabled, a user's arrays are easily wider than the program's.
    probs = None if draft.probs is None else draft.probs.astype(jnp.float32)
    draft = Draft(draft.tokens.astype(jnp.int32), probs, draft.topology, draft.valid)
    if draft.valid is not None:
        draft = only(draft, draft.valid, draft.tokens)
    if context.budget is not None:
        draft = only(draft, prefix_mask(context.budget, num_draft_tokens))
    if is_foreign(drafter):
        embeddings = embeddings_of(drafter)
        readable = context.vocab_size + (0 if embeddings is None else len(embeddings))
        read = jnp.where(outside(draft.tokens, readable), 0, draft.tokens)
        draft = only(draft, ~outside(draft.tokens, context.vocab_size), read)
    return draft


def _alike(tree: Tree | DynamicTree, other: Tree | DynamicTree) -> bool:
    """Whether the one is the other, or of its size where only that is known."""
    if isinstance(tree, DynamicTree) and isinstance(other, DynamicTree):
        return (tree.size, tree.max_depth) == (other.size, other.max_depth)
    return tree == other


def own_tree(drafter: Any) -> Tree | DynamicTree | None:
    """The tree of a drafter whose drafts branch; None for one of chains."""
    tree = getattr(drafter, "tree", None)
    return tree if isinstance(tree, Tree | DynamicTree) else None


def tree_of(drafter: Any, num_draft_tokens: int) -> Tree | DynamicTree:
    """The shape of a drafter's drafts: the `tree` that it has, else a chain."""
    return own_tree(drafter) or Tree.chain(num_draft_tokens)


def as_tree(tree: Any) -> Tree:
    """`tree`, numbered by depth.

    Raises:
        TypeError: it is none.
        ValueError: it has no guesses.
    """
    if not isinstance(tree, Tree):
        raise TypeError(f"tree is of type {type(tree).__name__}; pass a jspec.Tree, such as "
                        "jspec.Tree.branching((3, 2, 1)).")  # fmt: skip
    if not tree.size:
        raise ValueError("tree has no guesses; give it at least one, or decode with jspec.generate.")
    return tree.by_depth()


def certain(tokens: Array, guessed: Array, context: Context, tree: Tree | None = None) -> Draft:
    """A draft of ``tokens[B, K]`` that the text alone decides: one-hot laws, or zeros where not ``guessed[B, K]``."""
    laws = jax.nn.one_hot(tokens, context.vocab_size, dtype=jnp.float32)
    return Draft(tokens, laws * guessed[..., None].astype(laws.dtype), tree)


def outside(tokens: Array, vocab_size: int) -> Array:
    """``bool[B, K]``: the tokens that no vocabulary of this size has."""
    return (tokens < 0) | (tokens >= vocab_size)


def only(draft: Draft, kept: Array, otherwise: Array | int = 0) -> Draft:
    """`draft` with guesses only where ``kept[B, K]``, and other tokens elsewhere."""
    probs = None if draft.probs is None else jnp.where(kept[..., None], draft.probs, 0)
    valid = None if draft.valid is None else draft.valid & kept
    return Draft(jnp.where(kept, draft.tokens, otherwise), probs, draft.tree, valid)


def shared_vocabulary(drafter: str, *sizes: int | None) -> int | None:
    """The vocabulary that the parts of a `drafter` share: the smallest, where others are longer by padding.

    Raises:
        ValueError: the parts have several.
    """
    known = sorted({size for size in sizes if size is not None})
    if not all(longer_by_padding(size, known[0]) for size in known[1:]):
        raise ValueError(f"{drafter} combines vocabularies of {' and '.join(map(str, known))} tokens; "
                         "use drafters that share the target's tokenizer.")  # fmt: skip
    return known[0] if known else None


def fit_vocabulary(logits: Array, vocab_size: int) -> Array:
    """``[..., V]`` from logits whose vocabulary is V but for rows that pad one of the two.

    Rows that pad the draft's are no tokens and are cut off; of those that pad the target's the draft has no idea, so
    that it never drafts them.

    Raises:
        ValueError: the two differ by more than that.
    """
    if not same_but_for_padding(logits.shape[-1], vocab_size):
        raise ValueError(f"A draft's logits have {logits.shape[-1]} columns and the target's vocabulary {vocab_size} "
                         "tokens; expected as many, but for padding.")  # fmt: skip
    logits = logits[..., :vocab_size]
    missing = vocab_size - logits.shape[-1]
    if not missing:
        return logits
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def is_foreign(drafter: Drafter[Any] | None) -> bool:
    """Whether drafts come from a function from outside jspec; `AutoregressiveDrafter.propose` is jspec's own."""
    if drafter is None:
        return False
    home = type(drafter).propose.__module__ or ""  # code that was run from a string has none
    return home.split(".")[0] != __name__.split(".")[0]


class Stateless:
    """A drafter that remembers nothing from round to round: its `init` and `commit`."""

    # Not typed as (), for an `AutoregressiveDrafter` may have a state after all.
    def init(self, tokens: Array, num_slots: int) -> Any:
        """No state."""
        return ()

    def commit(self, state: Any, draft: Draft, verdict: Verdict, hidden: Array) -> Any:
        """Nothing to learn."""
        return state


def last_tokens(tokens: Array, lengths: Array, before: int, after: int = 0) -> tuple[Array, Array, Array]:
    """What is around the end of each row: its last `before` tokens, and `after` more.

    Returns:
        ``int32[B, before + after]``; the position ``int32[B]`` of the first of them, 0 in a row that is shorter than
        `before`; and the index ``int32[B]`` of the row's last token among them.
    """
    before = min(before, tokens.shape[1] - after)  # nested fallbacks ask for more than a short text has
    start = jnp.maximum(lengths - before, 0)
    return slice_rows(tokens, start, before + after), start, lengths - 1 - start
