"""How many rounds to play a call: enough for calls to cost little, and so few that nobody waits long for the next."""

from collections.abc import Hashable
from time import perf_counter

_MEMORY = 0.8


class Pace:
    """Counts a call's rounds so that it takes about `seconds`; on a fast device many, on a slow one a single one.

    Attributes:
        costs: seconds a round, by kind; of those that have been measured.
    """

    def __init__(self, most: int, seconds: float):
        self._most, self._wanted = most, seconds
        self.costs: dict[Hashable, float] = {}
        self._last: float | None = None

    def rounds(self, kind: Hashable) -> int:
        """Of the next call, which is of some kind: rounds of one kind cost alike."""
        return max(1, min(self._most, round(self._wanted / self.costs[kind]))) if kind in self.costs else 1

    def settled(self, kind: Hashable, rounds: int, at_once: bool, alone: bool) -> None:
        """A call of so many rounds has ended; it began when the one before ended if it came `at_once`.

        If it did not run `alone`, for texts were read before it, it counts only where nothing is known.
        """
        now = perf_counter()
        if at_once and self._last is not None and rounds and (alone or kind not in self.costs):
            each = (now - self._last) / rounds
            self.costs[kind] = _MEMORY * self.costs.get(kind, each) + (1 - _MEMORY) * each
        self._last = now
