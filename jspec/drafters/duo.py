# pyright: strict, reportUnknownMemberType=false
"""What drafters made of two have in common."""

from typing import Any

from jax import Array

from jspec.drafters.base import shared_vocabulary
from jspec.drafters.model import as_part
from jspec.types import Draft, Verdict, pytree


@pytree
class Duo:
    """Two drafters, or models, for one vocabulary."""

    first: Any
    second: Any

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            object.__setattr__(self, name, as_part(name, getattr(self, name)))

    @property
    def vocab_size(self) -> int | None:
        return shared_vocabulary(type(self).__name__, self.first.vocab_size, self.second.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The smaller of the two."""
        limits = (getattr(part, "max_positions", None) for part in (self.first, self.second))
        return min((limit for limit in limits if limit is not None), default=None)

    def init(self, tokens: Array, num_slots: int) -> tuple[Any, Any]:
        return self.first.init(tokens, num_slots), self.second.init(tokens, num_slots)

    def commit(self, state: tuple[Any, Any], draft: Draft, verdict: Verdict, hidden: Array) -> tuple[Any, Any]:
        """Both see the draft that was judged, whoever made it."""
        return (
            self.first.commit(state[0], draft, verdict, hidden),
            self.second.commit(state[1], draft, verdict, hidden),
        )
