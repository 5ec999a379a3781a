"""The drafter contract: a base class with three methods over pytrees, and defaults for everything optional.

A drafter is any pytree with the methods `init`, `propose` and `commit`. `propose` returns every token together with the
distribution that it was drawn from. As long as this distribution is correct, a drafter changes only the speed of
decoding and never the output distribution.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar, cast

import jax
from jax import Array

from jspec.core.probs import sample_with_noise
from jspec.core.sampling import LogitsTransforms, TokenCounts
from jspec.core.tree import DynamicTree, Tree
from jspec.core.types import Draft, PyTree, Verdict, passed
from jspec.drafters.declared import default
from jspec.drafters.draft_length import DraftLength
from jspec.drafters.former_names import former_needs_prefill, former_num_top_tokens
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TakingSignals, TargetSignals
from jspec.models.kv_cache import KVCache
from jspec.models.llama import Llama

State = TypeVar("State")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["model", "cache"], meta_fields=["unread"])
@dataclasses.dataclass(frozen=True)
class TargetView:
    """The model that will verify the draft, and its KV cache.

    Attributes:
        model: the target, or the middle model within a cascade.
        cache: the KV cache of `model`, read-only: a drafter's writes to it are discarded. The cache holds the sequence
            so far, except its last `unread` tokens. Later slots hold arbitrary values.
        unread: the number of trailing tokens missing from `cache`. It is at least 1, because the newest token has been
            sampled but not yet read.
    """

    model: Llama
    cache: KVCache
    unread: int


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "lengths", "noise", "transforms", "token_counts", "target", "budget", "length_state"],
    meta_fields=["vocab_size", "unread", "draft_length"],
)
@dataclasses.dataclass(frozen=True)
class Context:
    """The inputs for one draft.

    Attributes:
        tokens: ``int32[B, L]``, the prompt and the tokens generated so far; row b is valid up to ``lengths[b]``.
        lengths: ``int32[B]``, the number of valid tokens in each row.
        noise: ``float32[B, K, C, 2, W]``, the random numbers for drawing the draft tokens, fresh in every round. See
            `draw`. C is the largest number of draft tokens at one depth, 1 in a chain.
        transforms: the sampling transforms of the draft's distribution.
        token_counts: the counts that penalties use, or None if there are no penalties.
        target: the model that will verify the draft.
        vocab_size: V of the target.
        unread: the number of trailing tokens that a drafter's own cache may lack. It is 2 if the drafter proposes every
            draft itself: its last draft token, drawn but not read, and the token that the target sampled after it.
        budget: ``int32[B]``, the number of tokens to draft in each row, or None for the full number. Tokens beyond the
            budget are discarded.
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
    length_state: PyTree = None

    def draw(self, k: Array | int, probs: Array) -> Array:
        """Draw draft token k, ``int32[B]``, from its distribution ``probs[B, V]``. Use each k once per round."""
        return sample_with_noise(self.noise[:, k, 0], probs)


class Drafter(Generic[State]):
    """A source of draft tokens. Its `state` is a pytree whose shapes stay the same from round to round.

    A drafter defines `vocab_size`, `init`, `propose` and `commit`. All other attributes are optional and have defaults.
    They declare what else the drafter supports, and what it requests from the target.

    A drafter need not derive from this class. A method without a `signals` parameter takes the requested signals as
    separate arguments: ``init(tokens, num_slots, features, lengths, target)``,
    ``read(state, tokens, start, count, features, target)`` and
    ``commit(state, draft, verdict, hidden, features, target, top_tokens)``. Each method receives only the signals that
    the drafter requests.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("init", "read", "commit"):
            home = next(parent for parent in cls.__mro__ if name in vars(parent))
            if home is cls or not issubclass(home, Drafter):
                setattr(cls, name, TakingSignals(vars(cls).get(name), cls, name))

    if TYPE_CHECKING:  # required, so there is no default

        @default
        def vocab_size(self) -> int | None:
            """The vocabulary size, or None if the drafter supports any size.

            It must equal the target's. A token-by-token drafter may also have more or less padding than the target.
            """

    @default
    def max_positions(self) -> int | None:
        """The length of the longest sequence that the drafter supports, or None if there is no limit."""
        return None

    @default
    def max_chain_length(self) -> float:
        """The number of consecutive tokens that the drafter can draft."""
        return math.inf

    @default
    def tree(self) -> Tree | DynamicTree | None:
        """The tree that the drafter proposes, such as a `jspec.Tree`, or None if it proposes a chain.

        A node's distribution may depend only on the nodes before it on its branch and on its earlier siblings.
        """
        return None

    @default
    def replacement(self) -> bool | None:
        """Whether siblings are drawn independently from one distribution, as some rules require.

        None means that the drafter never draws siblings independently, whatever its options.
        """
        return None

    @default
    def features(self) -> tuple[int, ...]:
        """The indices of the F hidden states of the target that `init`, `read` and `commit` receive.

        Index i selects the input of layer i; the number of layers, or -1, selects the output of the last layer.
        """
        return ()

    @default
    def num_top_tokens(self) -> int:
        """The number n of the verifying model's most likely next tokens that `commit` receives for each token."""
        return former_num_top_tokens(self)

    @default
    def embeddings(self) -> Array | None:
        """Vectors ``float[M, E]`` that the drafter may propose as ids V to V + M - 1, at nodes without a draft token.

        The target reads row i as the embedding of id V + i, after the tokens before it on the branch. `commit` receives
        the target's state at this node in `TargetSignals.hidden`, as at any other node.
        """
        return None

    @default
    def has_confidence(self) -> bool:
        """Whether the drafter can report its confidence in its draft tokens, as some draft lengths require.

        If so, `propose` calls the methods of ``context.draft_length`` that decide where a draft ends.
        """
        return self.is_token_by_token

    @default
    def is_token_by_token(self) -> bool:
        """Whether the drafter has `begin` and `extend`. See `jspec.drafters.AutoregressiveDrafter`."""
        return hasattr(self, "extend")

    @default
    def unrolled(self) -> bool:
        """Whether a chain is drawn without a loop. See `jspec.drafters.AutoregressiveDrafter`."""
        return False

    @default
    def parts(self) -> "tuple[Drafter[PyTree], ...]":
        """The drafters that this drafter combines; empty for most drafters."""
        return ()

    @default
    def can_read(self) -> bool:
        """Whether the drafter defines `read`."""
        return type(self).read is not Drafter.read

    @default
    def needs_prefill(self) -> bool:
        """Whether the drafter stores something about a sequence during prefill. If so, an engine needs `read`."""
        return former_needs_prefill(self)

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> State:
        """Return the state before the first round.

        ``tokens[B, P]`` are the prompts, and ``num_slots`` is an upper bound on all positions.
        """
        raise NotImplementedError

    def read(self, state: State, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> State:
        """Read the next piece of a sequence, and return the state after it.

        See `jspec.drafters.chunked_prefill.prefill_chunk`.

        A drafter with this method can prefill a sequence in pieces, as `jspec.engine.Engine` does. If a drafter lacks
        this method, `init` receives each prompt as a whole, once the target has prefilled the prompt.
        """
        raise NotImplementedError

    def propose(self, state: State, context: Context, num_draft_tokens: int) -> tuple[Draft, State]:
        """Return a draft of `num_draft_tokens` tokens, from position ``context.lengths`` on, and the new state.

        All token ids are below ``context.vocab_size``.
        """
        raise NotImplementedError

    def commit(self, state: State, draft: Draft, verdict: Verdict, signals: TargetSignals) -> State:
        """Return the state after a draft has been verified.

        `signals` holds the verifying model's output over the draft, at node 0 and at every draft token. In a row that
        ends in this round, `verdict` leaves out the tokens after the end.

        In a combined drafter, the draft may come from another part. In a `jspec.MultiDrafter`, a part with `features`
        receives only the accepted path, as a chain, whichever part proposed it.

        If draft lengths vary, the values after a row's last token with a distribution are arbitrary. Ignore them when
        updating the state.
        """
        raise NotImplementedError


class DrafterLike(Protocol):
    """A drafter that does not derive from `Drafter`, or whose methods take the requested signals as arguments."""

    @property
    def vocab_size(self) -> int | None: ...

    @property
    def init(self) -> Callable[..., PyTree]: ...

    @property
    def propose(self) -> Callable[..., tuple[Draft, PyTree]]: ...

    @property
    def commit(self) -> Callable[..., PyTree]: ...


# Anything that a caller may pass as a draft. A combined drafter converts its parts to `Drafter` when it is constructed.
DraftSource: TypeAlias = Llama | Drafter[PyTree] | DrafterLike


class Stateless(Drafter[State]):
    """A base class, with `init` and `commit`, for drafters that keep no state between rounds."""

    @default
    def needs_prefill(self) -> bool:
        """Whether the drafter overrides `init`."""
        return not is_stateless_init(type(self).init)

    # A subclass whose state is not empty overrides `init`.
    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> State:
        """Return an empty state."""
        return cast(State, ())

    def commit(self, state: State, draft: Draft, verdict: Verdict, signals: TargetSignals) -> State:
        """Return `state` unchanged."""
        return state


def is_stateless_init(method: Callable[..., PyTree] | None) -> bool:
    """Return whether `method` is the `init` of `Stateless`, however it is wrapped."""
    own = cast(Callable[..., PyTree], Stateless.init)
    return method is not None and inspect.unwrap(method) is inspect.unwrap(own)


_NO_DRAFTER = Drafter[PyTree]()


def declared(drafter: object) -> Drafter[PyTree]:
    """Return `drafter` if it is a `Drafter`; for anything else, such as None, return a drafter with all defaults."""
    return cast(Drafter[PyTree], drafter) if isinstance(drafter, Drafter) else _NO_DRAFTER


def kind_of(drafter: object) -> str:
    """Return the name of a drafter's class for error messages."""
    return type(passed(drafter)).__name__


def is_user_defined(drafter: object) -> bool:
    """Return whether `drafter.propose` is defined outside jspec. A `propose` inherited from jspec does not count."""
    if not isinstance(drafter, Drafter):
        return False
    home = cast(type[Drafter[PyTree]], type(passed(cast(object, drafter)))).propose.__module__
    home = home or ""  # code that was run from a string has no module
    return home.split(".")[0] != __name__.split(".")[0]


def own_tree(drafter: object) -> Tree | DynamicTree | None:
    """Return a tree drafter's tree, or None for a chain drafter."""
    tree: object = declared(drafter).tree
    return tree if isinstance(tree, Tree | DynamicTree) else None


def tree_of(drafter: object, num_draft_tokens: int) -> Tree | DynamicTree:
    """Return the shape of a drafter's drafts: its `tree`, or a chain if it has none."""
    return own_tree(drafter) or Tree.chain(num_draft_tokens)


def as_tree(tree: object) -> Tree:
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
        raise ValueError("tree has no draft tokens; add at least one, or decode with jspec.generate.")
    return tree.by_depth()
