# pyright: strict, reportUnknownMemberType=false
"""The base class for drafters that combine two others."""

from typing import Any

from jax import Array

from jspec.core.types import Draft, Verdict, pytree
from jspec.drafters.base import shared_vocabulary
from jspec.drafters.capabilities import features_of_all, least, max_chain_length_of, num_likeliest_of, signals_for
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.standalone.model import as_part


@pytree
class PairDrafter:
    """Two drafters or models with one vocabulary. Each receives the values that it requests from the target."""

    first: Any
    second: Any

    def __post_init__(self) -> None:
        for name in ("first", "second"):
            object.__setattr__(self, name, as_part(name, getattr(self, name), forwards_signals=True))

    @property
    def parts(self) -> tuple[Any, Any]:
        return self.first, self.second

    @property
    def vocab_size(self) -> int | None:
        return shared_vocabulary(type(self).__name__, self.first.vocab_size, self.second.vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The smaller limit of the two."""
        return least(getattr(part, "max_positions", None) for part in (self.first, self.second))

    @property
    def max_chain_length(self) -> float:
        """The number of consecutive tokens that both can draft."""
        return min(max_chain_length_of(self.first), max_chain_length_of(self.second))

    @property
    def features(self) -> tuple[int, ...]:
        return features_of_all(self.first, self.second)

    @property
    def num_likeliest(self) -> int:
        return max(num_likeliest_of(self.first), num_likeliest_of(self.second))

    def init(self, tokens: Array, num_slots: int, **target_signals: Any) -> tuple[Any, Any]:
        first, second = (
            part.init(tokens, num_slots, **self._signals_for(part, target_signals))
            for part in (self.first, self.second)
        )
        return first, second

    def read(
        self, state: tuple[Any, Any], tokens: Array, start: Array, count: Array, **target_signals: Any
    ) -> tuple[Any, Any]:
        """Prefill the next piece with both. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        first, second = (
            prefill_chunk(part, own, tokens, start, count, **self._signals_for(part, target_signals))
            for part, own in zip((self.first, self.second), state, strict=True)
        )
        return first, second

    def commit(
        self, state: tuple[Any, Any], draft: Draft, verdict: Verdict, hidden: Array, **target_signals: Any
    ) -> tuple[Any, Any]:
        """Pass the verified draft to both, regardless of which one proposed it."""
        first, second = (
            part.commit(own, draft, verdict, hidden, **self._signals_for(part, target_signals))
            for part, own in zip((self.first, self.second), state, strict=True)
        )
        return first, second

    def _signals_for(self, part: Any, target_signals: dict[str, Any]) -> dict[str, Any]:
        return signals_for(part, self.features, target_signals)
