"""Drafting statistics in responses."""

import dataclasses
from collections import Counter
from typing import Self

from jspec.core.types import Json
from jspec.engine import Result


@dataclasses.dataclass
class DraftUsage:
    """Counts of rounds and draft tokens. A round counts if the client received one of its tokens.

    Attributes:
        rounds: the number of rounds.
        drafted, judged, accepted: numbers of draft tokens, as counted in `jspec.Stats`.
        by_accepted: the number of rounds with a draft, keyed by how many tokens they accepted.
    """

    rounds: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    by_accepted: Counter[int] = dataclasses.field(default_factory=Counter[int])

    @classmethod
    def of(cls, result: Result, delivered: int) -> Self:
        """Return the statistics of an output with `delivered` tokens. The engine may have decoded more tokens."""
        usage, tokens = cls(), 0
        for drafted, judged, accepted in zip(result.drafted, result.judged, result.accepted, strict=False):
            if tokens >= delivered:
                break
            tokens += accepted + 1
            usage.rounds += 1
            usage.drafted += drafted
            usage.judged += judged
            usage.accepted += accepted
            usage.by_accepted.update([accepted] if drafted else [])
        return usage

    def __add__(self, other: Self) -> Self:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(one + more for one, more in pairs))

    @property
    def drafts(self) -> int:
        """The number of rounds that had a draft."""
        return self.by_accepted.total()

    def as_json(self, num_draft_tokens: int) -> dict[str, Json]:
        """Return the statistics for clients. Rates are None if nothing was drafted."""
        return {
            "mean_acceptance_length": 1 + self.accepted / self.drafts if self.drafts else None,
            "acceptance_rate": self.accepted / self.judged if self.judged else None,
            "acceptance_histogram": [self.by_accepted[count] for count in range(num_draft_tokens + 1)],
            "rounds": self.rounds,
            "drafted": self.drafted,
            "judged": self.judged,
            "accepted": self.accepted,
        }
