"""The base class for drafters that combine two other drafters."""

from typing import cast

from jax import Array

from jspec.core.types import Draft, PyTree, Verdict, pytree
from jspec.drafters.base import Drafter, DraftSource, declared
from jspec.drafters.capabilities import features_of, features_of_all, least, max_chain_length_of, num_top_tokens_of
from jspec.drafters.chunked_prefill import prefill_chunk
from jspec.drafters.drafts import shared_vocabulary
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals
from jspec.drafters.standalone.model import as_part

Pair = tuple[PyTree, PyTree]


@pytree
class PairDrafter(Drafter[Pair]):
    """Two drafters or models with the same vocabulary. Each part receives the values it requests from the target."""

    first: DraftSource
    second: DraftSource

    def __post_init__(self) -> None:
        for name, draft in (("first", self.first), ("second", self.second)):
            object.__setattr__(self, name, as_part(name, draft, forwards_signals=True))

    @property
    def parts(self) -> tuple[Drafter[PyTree], Drafter[PyTree]]:
        return cast(tuple[Drafter[PyTree], Drafter[PyTree]], (self.first, self.second))

    @property
    def vocab_size(self) -> int | None:
        return shared_vocabulary(type(self).__name__, *(part.vocab_size for part in self.parts))

    @property
    def max_positions(self) -> int | None:
        """The smaller of the two parts' limits."""
        return least(declared(part).max_positions for part in self.parts)

    @property
    def max_chain_length(self) -> float:
        """The number of consecutive tokens that both parts can draft."""
        return min(map(max_chain_length_of, self.parts))

    @property
    def features(self) -> tuple[int, ...]:
        return features_of_all(*self.parts)

    @property
    def num_top_tokens(self) -> int:
        return max(map(num_top_tokens_of, self.parts))

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> Pair:
        first, second = (
            part.init(tokens, num_slots, signals.for_part(self.features, features_of(part))) for part in self.parts
        )
        return first, second

    def read(self, state: Pair, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> Pair:
        """Prefill the sequence's next piece with both parts. See `jspec.drafters.chunked_prefill.prefill_chunk`."""
        first, second = (
            prefill_chunk(part, own, tokens, start, count, signals.for_part(self.features, features_of(part)))
            for part, own in zip(self.parts, state, strict=True)
        )
        return first, second

    def commit(self, state: Pair, draft: Draft, verdict: Verdict, signals: TargetSignals) -> Pair:
        """Pass the verified draft to both parts, regardless of which part proposed it."""
        first, second = (
            part.commit(own, draft, verdict, signals.for_part(self.features, features_of(part), part.num_top_tokens))
            for part, own in zip(self.parts, state, strict=True)
        )
        return first, second
