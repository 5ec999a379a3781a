"""Constraints on output, such as grammars. The host computes the allowed tokens between drafting and verification.

The allowed tokens mask the target's distribution at every position of a draft. The output therefore has exactly the
constrained model's distribution, whatever the drafter and the draft length. Where a constraint allows only one text,
such as the next key of a JSON object, the tokens of this text replace the drafter's tokens.
"""

import abc
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar, TypeVarTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jspec.core.types import Draft
from jspec.decoding.state import DecodeState, RequestParams
from jspec.drafters.drafts import force_tokens
from jspec.engine.grammar_matcher import DeadEnd, tree_masks

_LOG = logging.getLogger("jspec")
_ALL = 0xFFFFFFFF  # 32 tokens, all allowed
# The constraints of all engines, keyed by process-wide number. Compiled programs, which engines share, use this dict.
_active_constraints: "weakref.WeakValueDictionary[int, _ActiveConstraint]" = weakref.WeakValueDictionary()
_process_numbers = itertools.count(1)
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Matcher(Protocol):
    """The state of a constraint within one output. A new matcher is positioned before the first new token."""

    def allowed(self) -> np.ndarray | bytes:
        """Return the allowed tokens, ``uint32[ceil(V / 32)]``, where token t is bit ``t % 32`` of word ``t // 32``."""
        ...

    def consume(self, token: int) -> bool:
        """Advance by `token`. If `token` is not allowed here, return False and do not advance."""
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        ...


class ForcingMatcher(Matcher, Protocol):
    """A matcher that also proposes draft tokens. They do not change the output's distribution."""

    def forced(self) -> Sequence[int]:
        """Return the tokens that must follow, or probably will; an empty list if there are none.

        The result must depend only on the tokens consumed so far.
        """
        ...


class ConstraintError(Exception):
    """An error raised if a constraint cannot be met.

    Attributes:
        code: a machine-readable code.
    """

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class DraftMasks(NamedTuple):
    """The masks for a draft, and its forced tokens.

    Attributes:
        masks: ``uint32[N + 1, ceil(V / 32)]``, the masks after the text and after each draft node. In a chain with
            forced tokens, these tokens replace draft nodes, and all later nodes are ignored.
        forced: ``int32[N]``, for each node, the forced token that replaces its token; -1 for none. See
            `ForcingMatcher.forced`.
    """

    masks: np.ndarray
    forced: np.ndarray

    @classmethod
    def dead_end(cls, count: int, size: int) -> Self:
        """Return `count` masks of `size` words that allow no token."""
        return cls(np.zeros((count, size), np.uint32), np.full(count - 1, -1, np.int32))


class MaskSource(abc.ABC):
    """A source of token masks for one output. Several sources may compute at the same time."""

    @abc.abstractmethod
    def ask(self, text: Sequence[int], drafted: Sequence[int], parents: Sequence[int]) -> None:
        """Start computing the masks after `text` (the new tokens) and after each draft node.

        Args:
            text: all new tokens so far, starting with those of the previous call.
            drafted: the token of each node.
            parents: the parent of each node: 0 for the text and i for node i - 1.
        """

    @abc.abstractmethod
    def masks(self) -> DraftMasks:
        """Wait for the masks and the forced tokens, and return them.

        All masks are zero if no token may follow the text.

        Raises:
            ConstraintError: the masks cannot be computed.
        """

    def close(self) -> None:  # noqa: B027 (most sources hold no resources)
        """Release the source's resources."""


Constraint = Callable[[], Matcher | MaskSource]  # called once for each output


class _InProcess(MaskSource):
    """A mask source that runs a `Matcher` in this process."""

    def __init__(self, make: Callable[[], Matcher], matcher: Matcher, vocab_size: int):
        self._make, self._matcher, self._vocab_size, self._consumed = make, matcher, vocab_size, 0
        self._question: tuple[Sequence[int], Sequence[int], Sequence[int]] = (), (), ()

    def ask(self, text: Sequence[int], drafted: Sequence[int], parents: Sequence[int]) -> None:
        self._question = text, drafted, parents

    def masks(self) -> DraftMasks:
        text, drafted, parents = self._question
        size = -(-self._vocab_size // 32)
        masks = np.full((len(drafted) + 1, size), _ALL, np.uint32)
        self._consume_text(text)

        def reset(path: list[int]) -> Matcher:
            self._matcher, self._consumed = self._make(), 0
            self._consume_text([*text, *path])
            self._consumed = len(text)
            return self._matcher

        try:
            computed, forced = tree_masks(self._matcher, drafted, parents, self._vocab_size, reset)
        except DeadEnd:
            return DraftMasks.dead_end(*masks.shape)
        for mask, bits in zip(masks, computed, strict=True):
            if bits is not None:
                mask[:] = np.frombuffer(bits, np.uint32)[:size] if len(bits) else 0
        return DraftMasks(masks, np.array(forced, np.int32))

    def _consume_text(self, tokens: Sequence[int]) -> None:
        while self._consumed < len(tokens):
            if not self._matcher.consume(tokens[self._consumed]):
                raise ValueError(f"The constraint rejected token {tokens[self._consumed]}, which it had allowed.")
            self._consumed += 1


class _ActiveConstraint:
    """A running request's constraint, its number in the process, and its error."""

    def __init__(self, make: Constraint, vocab_size: int):
        matcher = make()
        self.source = (
            matcher
            if isinstance(matcher, MaskSource)
            else _InProcess(cast("Callable[[], Matcher]", make), matcher, vocab_size)
        )
        self.error: ConstraintError | None = None
        self.number = next(_process_numbers)
        _active_constraints[self.number] = self

    def attempt(self, compute: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result | None:
        """Return the result of `compute`. If it raises, keep the error and return None."""
        try:
            return compute(*arguments)
        except ConstraintError as error:
            self.error = error
        except BaseException as error:  # raised in an XLA thread, where it would end the call for all requests
            _LOG.exception("A constraint has failed; its request ends.")
            self.error = ConstraintError(
                f"The constraint has failed: {type(error).__name__}: {error}", "constraint_failed"
            )
        return None


class Constraints:
    """The constraints of an engine's running requests, numbered within the engine."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self._active: dict[int, _ActiveConstraint] = {}
        self._numbers = itertools.count(1)

    def add(self, make: Constraint) -> int:
        """Start tracking a new request's constraint, and return its number."""
        active = _ActiveConstraint(make, self._vocab_size)
        number = next(self._numbers)  # counts only the constraints that could be created, as a journal does
        self._active[number] = active
        return number

    def drop(self, number: int) -> None:
        """Stop tracking a constraint, and release it."""
        if active := self._active.pop(number, None):
            active.source.close()

    def clear(self) -> None:
        """Drop all constraints."""
        for number in [*self._active]:
            self.drop(number)

    def error(self, number: int) -> ConstraintError | None:
        """Return a constraint's error, if any. Number 0 means no constraint, and has no error."""
        return self._active[number].error if number else None

    def why_nothing_follows(self, number: int, text: Sequence[int]) -> ConstraintError:
        """Return an error that explains why no token may follow `text`, a constrained request's new tokens."""
        active = self._active[number]
        active.attempt(active.source.ask, text, (), ())
        draft_masks = None if active.error else active.attempt(active.source.masks)
        if draft_masks is None:
            return active.error or ConstraintError("The constraint has failed.", "constraint_failed")
        if draft_masks.masks.any():
            return ConstraintError(
                "No token may follow: logit_bias or min_tokens forbids every token that the constraint allows; "
                "relax one of the two.",
                "constraint_conflict",
            )
        return ConstraintError(
            "The constraint reached a state in which no token may follow; try again with another "
            "seed, or simplify the constraint.",
            "constraint_dead_end",
        )

    def in_process(self, number: int) -> int:
        """Return a constraint's process-wide number, or 0 for no constraint.

        Rows carry this number, because slots are reassigned.
        """
        return self._active[number].number if number else 0


def constrain(params: RequestParams, state: DecodeState, draft: Draft, *, vocab_size: int) -> tuple[Draft, Array]:
    """Return the draft with forced tokens, and ``bool[B, N + 1, V]``: the tokens allowed at each of its positions."""
    batch, nodes, size = state.lengths.shape[0], draft.tokens.shape[1] + 1, -(-vocab_size // 32)
    shapes = jax.ShapeDtypeStruct((batch, nodes, size), jnp.uint32), jax.ShapeDtypeStruct((batch, nodes - 1), jnp.int32)
    assert params.constraints is not None, "some row is constrained"
    numbers = jnp.where(state.done, 0, params.constraints)
    parents = jnp.broadcast_to(jnp.asarray(draft.topology.parents, jnp.int32), (batch, nodes - 1))

    def ask_host() -> tuple[Array, Array]:
        columns = numbers, params.prompt_lengths, state.lengths
        # One array, because JAX moves every argument of a callback separately, which takes time.
        question = jnp.concatenate([*(column[:, None] for column in columns), draft.tokens, parents, state.tokens], 1)
        return jax.pure_callback(functools.partial(_compute_masks, size, nodes), shapes, question)

    def allow_all() -> tuple[Array, Array]:
        return jnp.full(shapes[0].shape, _ALL, jnp.uint32), jnp.full(shapes[1].shape, -1, jnp.int32)

    bits, forced = cast(tuple[Array, Array], lax.cond(numbers.any(), ask_host, allow_all))
    is_allowed = bits[..., None] >> lax.broadcast_to_rank(jnp.arange(32, dtype=jnp.uint32), bits.ndim + 1) & 1
    if draft.topology.is_chain:
        draft = force_tokens(draft, forced)
    return draft, is_allowed.reshape(batch, nodes, -1)[..., :vocab_size] != 0


def _compute_masks(size: int, nodes: int, question: Array) -> tuple[np.ndarray, np.ndarray]:
    numbers, starts, ends = np.asarray(question)[:, :3].T
    drafted, parents, tokens = np.split(np.asarray(question)[:, 3:], (nodes - 1, 2 * nodes - 2), axis=1)
    bits = np.full((len(numbers), nodes, size), _ALL, np.uint32)
    forced = np.full(drafted.shape, -1, np.int32)
    pending: list[tuple[int, _ActiveConstraint]] = []
    for row in np.flatnonzero(numbers):
        active = _active_constraints.get(int(numbers[row]))
        if active is None or active.error:
            continue  # its request was cancelled, or ends with the error
        text = tokens[row, starts[row] : ends[row]].tolist()
        active.attempt(active.source.ask, text, drafted[row].tolist(), parents[row].tolist())
        pending.append((int(row), active))
    for row, active in pending:  # all sources compute at the same time
        draft_masks = None if active.error else active.attempt(active.source.masks)
        if draft_masks is not None:
            bits[row], forced[row] = draft_masks
    return bits, forced
