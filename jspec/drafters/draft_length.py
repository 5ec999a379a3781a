"""The number of tokens to draft per round: a fixed number, or a number chosen for each row and round.

A mask gives rows different lengths: a token beyond a row's budget has an all-zero distribution, which no rule accepts.
Two things save time. Drafting stops as soon as no row continues, and verification uses the shortest of a few compiled
lengths that holds all drafts. (If a batch is sharded over devices, both decisions cover all devices: the first is made
once per token, the second once per round.) Therefore the other rows of a batch affect which compiled length is used for
a row. The row's output stays the same except for rounding. If rounding matters, as it does in half precision, use a
plain number.

The decision to continue may depend on everything drafted so far, including the last token, but it cannot remove that
token. Discarding a token after looking at it would change the output distribution: the target would choose another
token exactly where the draft was unsure.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from jspec.core.types import PyTree, check_between, check_count
from jspec.drafters.declared import default


class DraftLength:
    """A policy that decides how many tokens to draft. It is hashable, because it is part of the compiled program.

    A policy defines `max_draft_tokens` and `budget`. By default it has no state and needs no confidence. A policy that
    does not derive from this class must define every attribute and method except `should_draft` and `is_worthwhile`.

    Only a `jspec.drafters.AutoregressiveDrafter`, or a `jspec.FallbackDrafter` that contains one, can call
    `should_draft`, `is_worthwhile` and `continues`.

    Attributes:
        max_draft_tokens: K, the largest number of tokens in a draft. It determines array shapes.
        needs_confidence: whether to call `continues`.
    """

    max_draft_tokens: int
    needs_confidence: ClassVar[bool] = False

    @default
    def may_skip(self) -> bool:
        """Whether to call `should_draft`: True if the policy defines it."""
        return type(self).should_draft is not DraftLength.should_draft

    @default
    def needs_acceptance(self) -> bool:
        """Whether to call `is_worthwhile`: True if the policy defines it."""
        return type(self).is_worthwhile is not DraftLength.is_worthwhile

    @property
    def needs_estimates(self) -> bool:
        """Whether to call `should_draft`, `is_worthwhile` or `continues`."""
        return self.needs_confidence or self.may_skip or self.needs_acceptance

    def init(self, batch: int) -> PyTree:
        """Return the state before the first round, a pytree."""
        return ()

    def budget(self, state: PyTree, batch: int) -> Array | None:
        """Return the number of tokens to draft in this round, ``int32[B]`` in 0 .. K.

        None means K in every row. An array that holds K in every row would cost more.
        """
        raise NotImplementedError

    def should_draft(self, state: PyTree, confidence: Array) -> Array:
        """Return whether to draft at all, ``bool[B]``.

        `confidence` ``[B]`` is the probability of the most likely first token, because no token has been drawn yet.
        """
        return jnp.ones(confidence.shape, bool)

    def is_worthwhile(self, state: PyTree, num_drafted: Array | int, expected: Array, survival: Array) -> Array:
        """Return whether to draft one more token, ``bool[B]``, before it is drawn.

        Args:
            state: the state of the policy.
            num_drafted: k, the number of draft tokens so far.
            expected: ``float32[B]``, the expected number of tokens of this round if the draft ends here:
                ``1 + S_1 + ... + S_k``, where S_i is the estimated probability that the first i draft tokens are
                accepted. See `jspec.drafters.AutoregressiveDrafter.acceptance`.
            survival: ``float32[B]``, S_{k + 1}.
        """
        return jnp.ones(survival.shape, bool)

    def continues(self, state: PyTree, confidence: Array) -> Array:
        """Return whether to draft one more token, ``bool[B]``.

        `confidence` ``[B]`` is the last token's probability before any transforms.
        """
        return jnp.ones(confidence.shape, bool)

    def update(self, state: PyTree, drafted: Array, accepted: Array) -> PyTree:
        """Return the state after a round that accepted ``accepted int32[B]`` of ``drafted int32[B]`` tokens.

        Both are 0 in idle rows.
        """
        return state


@dataclasses.dataclass(frozen=True)
class Fixed(DraftLength):
    """A fixed draft length for every row and round. A plain number is shorthand for it; 0 means plain decoding."""

    max_draft_tokens: int

    def budget(self, state: PyTree, batch: int) -> None:
        return None


# The default if no length is given. It is compared by identity, because a drafter with a tree takes no length.
DEFAULT = Fixed(4)


@dataclasses.dataclass(frozen=True)
class AtMost(DraftLength):
    """A policy that always drafts the largest allowed number of tokens."""

    max_draft_tokens: int

    def __post_init__(self) -> None:
        check_count("max_draft_tokens", self.max_draft_tokens)
        object.__setattr__(self, "max_draft_tokens", int(self.max_draft_tokens))

    def budget(self, state: PyTree, batch: int) -> Array:
        return jnp.full(batch, self.max_draft_tokens, jnp.int32)


@dataclasses.dataclass(frozen=True)
class UpTo(AtMost):
    """A policy that drafts as many tokens as the drafter proposes, up to the largest allowed number.

    A round without draft tokens costs as much as a plain step. Use this policy with prompt-lookup drafters. With a
    draft model, it behaves like the plain number.
    """


@dataclasses.dataclass(frozen=True)
class WhileConfident(AtMost):
    """A policy that stops drafting after the first token whose draft probability is below `threshold`.

    The probability is taken before temperature and filters, so it is informative in greedy decoding, too. The policy
    works like ``assistant_confidence_threshold`` in transformers, whose default is 0.4.

    Attributes:
        first: draft nothing if the most likely first token has a probability below this value. The round then costs
            little more than a plain step. If the value is 0, at least one token is always drafted. Use `first` on
            devices where additional rows cost time.
    """

    threshold: float = 0.4
    first: float = 0
    needs_confidence: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("threshold", self.threshold, 0, 1)
        if self.first != 0:
            check_between("first", self.first, 0, 1)

    def should_draft(self, state: PyTree, confidence: Array) -> Array:
        return confidence >= self.first if self.first else jnp.ones(confidence.shape, bool)

    def continues(self, state: PyTree, confidence: Array) -> Array:
        return confidence >= self.threshold


@dataclasses.dataclass(frozen=True)
class ByConfidence(AtMost):
    """A policy like `WhileConfident` that adapts each row's threshold to reach a desired acceptance rate.

    The threshold starts at 0.4. Let m be the number of verified draft tokens in a round and n the number of accepted
    ones, both without the round's first draft token. After the round, the threshold changes by
    ``0.05 (acceptance m - n)``, and stays between 0 and 1. This is a stochastic approximation with a constant step, so
    it adapts as the text changes. It is based on the adaptive draft-exiting of Zhang et al. 2024, Draft & Verify. The
    first token is drafted whatever the confidence, so it carries no information about the threshold. If even the tokens
    after the most confident ones are rejected too often, drafts shrink to one token.

    In a `jspec.FallbackDrafter` the threshold adapts to the drafts of both parts, even if only one part uses it.

    Attributes:
        acceptance: the desired share of accepted draft tokens among those verified, excluding the first of each round.
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
    """A policy that drafts two more tokens after a round that accepted the whole draft, and one fewer after any other.

    The number stays between 1 and `max_draft_tokens`. Each row has its own number, which starts at half of
    `max_draft_tokens`, rounded up. transformers uses the same rule (``num_assistant_tokens_schedule="heuristic"``).
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
class _ByCost(AtMost):
    """A policy that knows the cost of another draft token."""

    cost_ratio: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("cost_ratio", self.cost_ratio, 0, 1000)


@dataclasses.dataclass(frozen=True)
class ByAcceptance(_ByCost):
    """A policy that chooses the draft length that is fastest at the row's recent acceptance rate.

    The best k maximises ``(1 + a + ... + a^k) / (1 + k c)`` (Leviathan et al. 2023, theorem 3.8). c is `cost_ratio`,
    and a is the share of accepted draft tokens among the verified ones. Older rounds count less, by a factor of 0.9 per
    round. Before the first round, a = 1/2, and this initial value counts as much as two draft tokens.

    Attributes:
        cost_ratio: the cost of one more draft token, including its row in verification, as a fraction of the cost of
            one plain decoding step.
    """

    def init(self, batch: int) -> tuple[Array, Array]:
        """Return the weighted numbers of accepted and verified draft tokens."""
        return jnp.zeros(batch, jnp.float32), jnp.zeros(batch, jnp.float32)

    def budget(self, state: tuple[Array, Array], batch: int) -> Array:
        accepted, judged = state
        rate = (accepted + 1) / (judged + 2)
        drafts = jnp.arange(self.max_draft_tokens + 1).astype(jnp.float32)[None]
        tokens = jnp.cumsum(rate[:, None] ** drafts, axis=1)
        speedup = tokens / (1 + drafts * self.cost_ratio)
        return 1 + jnp.argmax(speedup[:, 1:], axis=1).astype(jnp.int32)  # a round without a draft would measure nothing

    def update(self, state: tuple[Array, Array], drafted: Array, accepted: Array) -> tuple[Array, Array]:
        counts = (count.astype(jnp.float32) for count in (accepted, _judged(drafted, accepted)))
        sums = [0.9 * old + count for old, count in zip(state, counts, strict=True)]
        accepted, judged = (jnp.where(drafted > 0, new, old) for new, old in zip(sums, state, strict=True))
        return accepted, judged


@dataclasses.dataclass(frozen=True)
class ByEstimatedAcceptance(_ByCost):
    """A policy that drafts another token as long as it raises the estimated number of tokens per unit of time.

    Let S_i be the estimated probability that the first i draft tokens are accepted, and c the `cost_ratio`. A round
    with k draft tokens is expected to yield ``1 + S_1 + ... + S_k`` tokens, and costs as much as ``1 + k c`` plain
    decoding steps (Leviathan et al. 2023, theorem 3.8, with a probability for each token in place of a single rate).
    Draft token k is drafted if it raises the ratio of tokens to cost. Otherwise, the draft ends. If even the first
    draft token does not raise the ratio, nothing is drafted.

    The estimates are those of `jspec.drafters.AutoregressiveDrafter.acceptance`. A `jspec.drafters.BlockDrafter` with
    a confidence head uses that head's estimates (DSpark, arXiv 2607.05147), but not as a part of a
    `jspec.MixtureDrafter`, whose tokens have another distribution.

    S_k depends only on the tokens before draft token k, and the decision precedes the draw. Given these tokens, a draft
    token is therefore either always verified or never drawn, so every exact rule stays exact. A decision that also
    depended on token k, or on later ones, would discard drawn tokens and bias the output.

    Attributes:
        cost_ratio: the cost of one more draft token, including its row in verification, as a fraction of the cost of
            one plain decoding step.
    """

    def is_worthwhile(self, state: PyTree, num_drafted: Array | int, expected: Array, survival: Array) -> Array:
        return survival * (1 + num_drafted * self.cost_ratio) > expected * self.cost_ratio


def _judged(drafted: Array, accepted: Array) -> Array:
    """Return the number of draft tokens that a round verified: the accepted ones, plus the rejected one if any."""
    return accepted + (accepted < drafted).astype(jnp.int32)


def compiled_lengths(draft_length: DraftLength) -> tuple[int, ...]:
    """Return the draft lengths to compile verification for: 0, powers of two, and K; only K for a `Fixed` length.

    For `UpTo`, the lengths are only 0 and K, because prompt lookup drafts all or nothing. The same holds for
    `WhileConfident` with `first`, which is intended for devices where the second row costs time and further rows cost
    little more. For each length, the whole target is compiled again.
    """
    longest = draft_length.max_draft_tokens
    if isinstance(draft_length, Fixed):
        return (longest,)
    may_not_begin = isinstance(draft_length, WhileConfident) and draft_length.first > 0
    return (0, longest) if may_not_begin or isinstance(draft_length, UpTo) else (0, *doubling(longest))


def doubling(largest: int) -> tuple[int, ...]:
    """Return the powers of two below `largest`, and `largest`."""
    return (*(1 << i for i in range((largest - 1).bit_length())), largest)
