# pyright: reportIncompatibleVariableOverride=false
"""The adapter for draft-length policies that do not derive from `DraftLength`."""

import dataclasses
import operator
from typing import Protocol, SupportsIndex, cast

from jax import Array

from jspec.core.types import Adapter, PyTree
from jspec.drafters.draft_length import DraftLength, Fixed


class _Length(Protocol):
    """A policy that does not derive from `DraftLength`."""

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def needs_confidence(self) -> bool: ...

    def init(self, batch: int) -> PyTree: ...

    def budget(self, state: PyTree, batch: int) -> Array | None: ...

    def continues(self, state: PyTree, confidence: Array) -> Array: ...

    def update(self, state: PyTree, drafted: Array, accepted: Array) -> PyTree: ...


class _WithOptionalMethods(Protocol):
    """The optional methods of a draft length."""

    def should_draft(self, state: PyTree, confidence: Array) -> Array: ...

    def is_worthwhile(self, state: PyTree, num_drafted: Array | int, expected: Array, survival: Array) -> Array: ...


@dataclasses.dataclass(frozen=True)
class _DuckLength(DraftLength, Adapter):
    """The adapter around a policy that does not derive from `DraftLength`."""

    length: _Length

    @property
    def original(self) -> object:
        return self.length

    @property
    def max_draft_tokens(self) -> int:
        return self.length.max_draft_tokens

    @property
    def needs_confidence(self) -> bool:
        return self.length.needs_confidence

    @property
    def may_skip(self) -> bool:
        return hasattr(self.length, "should_draft")

    @property
    def needs_acceptance(self) -> bool:
        return hasattr(self.length, "is_worthwhile")

    def init(self, batch: int) -> PyTree:
        return self.length.init(batch)

    def budget(self, state: PyTree, batch: int) -> Array | None:
        return self.length.budget(state, batch)

    def should_draft(self, state: PyTree, confidence: Array) -> Array:
        return cast(_WithOptionalMethods, self.length).should_draft(state, confidence)

    def is_worthwhile(self, state: PyTree, num_drafted: Array | int, expected: Array, survival: Array) -> Array:
        return cast(_WithOptionalMethods, self.length).is_worthwhile(state, num_drafted, expected, survival)

    def continues(self, state: PyTree, confidence: Array) -> Array:
        return self.length.continues(state, confidence)

    def update(self, state: PyTree, drafted: Array, accepted: Array) -> PyTree:
        return self.length.update(state, drafted, accepted)


def as_draft_length(num_draft_tokens: object) -> DraftLength:
    """Return `num_draft_tokens`, a number or a policy, as a `DraftLength`."""
    if isinstance(num_draft_tokens, DraftLength):
        return num_draft_tokens
    if isinstance(num_draft_tokens, SupportsIndex):
        return Fixed(operator.index(num_draft_tokens))
    return _DuckLength(cast(_Length, num_draft_tokens))
