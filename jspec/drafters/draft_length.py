"""How many tokens to draft a round: one number, or row by row and from round to round.

Rows differ by a mask: a token beyond a row's budget has a law of zeros, which no rule accepts. Time is saved by
drafting no longer than some row goes on, and by verifying in the shortest of a few compiled lengths that holds all
drafts. (Of a batch that is sharded over devices these two are asked of all of them, once a token and once a round.)
So neighbours decide which compiled length verifies a row: its text stays its own but for rounding. Where that matters,
as it does in half precision, use a plain number.

Whether to go on may depend on all that has been drafted, the last token included, but that token stays: to look at a
token and then discard it would change the law of the text, for the target would be asked for another one just where
the draft was unsure.
"""

import dataclasses
import operator
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from jspec.core.types import check_between, check_count


class DraftLength(Protocol):
    """Decides how far to draft: hashable, for it is part of the program.

    One that has `starts`, of the arguments of `continues`, is asked with it whether to draft at all: of the first token
    it is told the probability that its law gives to the likeliest, for nothing has been drawn yet.

    Attributes:
        needs_confidence: whether `continues` is to be asked; only a `jspec.drafters.AutoregressiveDrafter` can, or a
            `jspec.FallbackDrafter` with one.
    """

    needs_confidence: ClassVar[bool]

    @property
    def max_draft_tokens(self) -> int:
        """K, the most tokens of a draft; fixes shapes."""
        ...

    def init(self, batch: int) -> Any:
        """What it remembers, a pytree, before the first round."""
        ...

    def budget(self, state: Any, batch: int) -> Array | None:
        """``int32[B]`` in 0 .. K: how many tokens to draft in this round; None for K in every row, which costs less."""
        ...

    def continues(self, state: Any, confidence: Array) -> Array:
        """``bool[B]``, whether to draft one more token; the last had this probability ``[B]`` before any transforms."""
        ...

    def update(self, state: Any, drafted: Array, accepted: Array) -> Any:
        """After a round that kept ``accepted int32[B]`` of ``drafted int32[B]`` tokens; both are 0 in idle rows."""
        ...


class _Forgetful:
    """What most have in common: nothing to remember, nothing to ask."""

    needs_confidence: ClassVar[bool] = False

    def init(self, batch: int) -> Any:
        return ()

    def continues(self, state: Any, confidence: Array) -> Array:
        return jnp.ones(confidence.shape, bool)

    def update(self, state: Any, drafted: Array, accepted: Array) -> Any:
        return state


@dataclasses.dataclass(frozen=True)
class Fixed(_Forgetful):
    """The same in every row and round: what a plain number stands for, and 0 for plain decoding."""

    max_draft_tokens: int

    def budget(self, state: Any, batch: int) -> None:
        return None


# Where nothing is given: this very object, for a drafter with a tree is given none.
DEFAULT = Fixed(4)


@dataclasses.dataclass(frozen=True)
class AtMost(_Forgetful):
    """Always as many as it may."""

    max_draft_tokens: int

    def __post_init__(self) -> None:
        check_count("max_draft_tokens", self.max_draft_tokens)
        object.__setattr__(self, "max_draft_tokens", int(self.max_draft_tokens))

    def budget(self, state: Any, batch: int) -> Array:
        return jnp.full(batch, self.max_draft_tokens, jnp.int32)


@dataclasses.dataclass(frozen=True)
class UpTo(AtMost):
    """Drafts as many as it may, or as far as there is a guess: a round without a guess costs a plain step.

    For drafters that look things up. With a model it does what the plain number does.
    """


@dataclasses.dataclass(frozen=True)
class WhileConfident(AtMost):
    """Stops after the first token to which the draft gave a probability below `threshold`.

    The probability is that before temperature and filters, so it tells something in greedy decoding, too; as
    ``assistant_confidence_threshold`` in transformers, which starts with 0.4.

    Attributes:
        first: drafts nothing where the likeliest first token has a probability below this, so that the round costs
            little more than a plain step; 0 always drafts one. For devices on which more rows cost more time.
    """

    threshold: float = 0.4
    first: float = 0
    needs_confidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("threshold", self.threshold, 0, 1)
        if self.first != 0:
            check_between("first", self.first, 0, 1)

    def starts(self, state: Any, confidence: Array) -> Array:
        return confidence >= self.first if self.first else jnp.ones(confidence.shape, bool)

    def continues(self, state: Any, confidence: Array) -> Array:
        return confidence >= self.threshold


@dataclasses.dataclass(frozen=True)
class ByConfidence(AtMost):
    """As `WhileConfident`, but each row finds its threshold: the one at which a wanted share of drafts is accepted.

    The threshold is 0.4 at first. After a round in which m drafts were judged and n of them accepted, the first of the
    round not counted, it moves by ``0.05 (acceptance m - n)``, and stays between 0 and 1: a stochastic approximation
    with a constant step, so that it follows a text that changes (after the adaptive draft-exiting of Zhang et al. 2024,
    Draft & Verify). The first is drafted however unsure, so it says nothing about the threshold. Where even what
    follows the surest is refused too often, drafts of one token are left.

    In a `jspec.FallbackDrafter` the threshold follows the drafts of both parts, and only one may ask for it.

    Attributes:
        acceptance: the wanted share of accepted drafts among those that are judged behind a first one.
    """

    acceptance: float = 0.8
    needs_confidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("acceptance", self.acceptance, 0, 1)

    def init(self, batch: int) -> Array:
        return jnp.full(batch, WhileConfident.threshold, jnp.float32)

    def continues(self, state: Array, confidence: Array) -> Array:
        return confidence >= state

    def update(self, state: Array, drafted: Array, accepted: Array) -> Array:
        counts = _judged(drafted, accepted), accepted
        judged, kept = (jnp.maximum(count - 1, 0).astype(jnp.float32) for count in counts)
        return jnp.clip(state + 0.05 * (self.acceptance * judged - kept), 0, 1)


@dataclasses.dataclass(frozen=True)
class Heuristic(AtMost):
    """Two tokens more after a round that kept all drafts, one less after any other, between 1 and `max_draft_tokens`.

    Each row has its own number, at first half of that, rounded up. The rule is that of transformers
    (``num_assistant_tokens_schedule="heuristic"``).
    """

    def init(self, batch: int) -> Array:
        return jnp.full(batch, (self.max_draft_tokens + 1) // 2, jnp.int32)

    def budget(self, state: Array, batch: int) -> Array:
        return state

    def update(self, state: Array, drafted: Array, accepted: Array) -> Array:
        more, less = jnp.minimum(state + 2, self.max_draft_tokens), jnp.maximum(state - 1, 1)
        longer = jnp.where(accepted == drafted, more, less)
        return jnp.where(drafted > 0, longer, state)


@dataclasses.dataclass(frozen=True)
class ByAcceptance(AtMost):
    """Drafts the length that pays best at the row's recent acceptance rate.

    The best k maximises ``(1 + a + ... + a^k) / (1 + k c)`` (Leviathan et al. 2023, theorem 3.8), with `cost_ratio` for
    c and for a the share of accepted drafts among those judged. Older rounds count for less, by 0.9 a round; before any
    it is 1/2, which counts as much as two drafts.

    Attributes:
        cost_ratio: what one more drafted token costs, its row in verification included, over a step of plain decoding.
    """

    cost_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("cost_ratio", self.cost_ratio, 0, 1000)

    def init(self, batch: int) -> tuple[Array, Array]:
        """Accepted and judged drafts, with their weights."""
        return jnp.zeros(batch, jnp.float32), jnp.zeros(batch, jnp.float32)

    def budget(self, state: tuple[Array, Array], batch: int) -> Array:
        accepted, judged = state
        rate = (accepted + 1) / (judged + 2)
        drafts = jnp.arange(self.max_draft_tokens + 1).astype(jnp.float32)[None]
        tokens = jnp.cumsum(rate[:, None] ** drafts, axis=1)
        speedup = tokens / (1 + drafts * self.cost_ratio)
        return 1 + jnp.argmax(speedup[:, 1:], axis=1).astype(jnp.int32)  # without a draft nothing would be learnt

    def update(self, state: tuple[Array, Array], drafted: Array, accepted: Array) -> tuple[Array, Array]:
        counts = (count.astype(jnp.float32) for count in (accepted, _judged(drafted, accepted)))
        sums = tuple(0.9 * old + count for old, count in zip(state, counts, strict=True))
        return jax.tree.map(lambda new, old: jnp.where(drafted > 0, new, old), sums, state)


def _judged(drafted: Array, accepted: Array) -> Array:
    """Drafts of a round that were looked at: the accepted ones, and one that was refused."""
    return accepted + (accepted < drafted).astype(jnp.int32)


def compiled_lengths(draft_length: DraftLength) -> tuple[int, ...]:
    """The draft lengths that verification is compiled for: none, powers of two, and K; of a `Fixed` one K alone.

    Of lookup, which guesses all or nothing, none and K; and where a draft may not begin, which is for devices where the
    second row costs time and the next ones little more. Each compiles all of the target once more.
    """
    longest = draft_length.max_draft_tokens
    if isinstance(draft_length, Fixed):
        return (longest,)
    may_not_begin = isinstance(draft_length, WhileConfident) and draft_length.first > 0
    return (0, longest) if may_not_begin or isinstance(draft_length, UpTo) else (0, *doubling(longest))


def doubling(largest: int) -> tuple[int, ...]:
    """The powers of two below `largest`, and `largest`."""
    return (*(1 << i for i in range((largest - 1).bit_length())), largest)


def as_draft_length(num_draft_tokens: Any) -> DraftLength:
    """What decides how far to draft, of what users pass: a number or a `DraftLength`."""
    is_number = not hasattr(num_draft_tokens, "budget")
    return Fixed(operator.index(num_draft_tokens)) if is_number else num_draft_tokens
