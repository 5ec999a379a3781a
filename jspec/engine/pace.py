"""How many rounds to play a call: enough for calls to cost little, and so few that nobody waits long for the next."""

from collections import Counter
from collections.abc import Hashable
from time import perf_counter

_MEMORY = 0.8
_PATIENCE = 8  # calls


class Pace:
    """Counts a call's rounds so that it takes about `seconds`; on a fast device many, on a slow one a single one.

    Attributes:
        costs: seconds a round, by kind; of those that have been measured.
    """

    def __init__(self, most: int, seconds: float):
        self._most, self._wanted = most, seconds
        self.costs: dict[Hashable, float] = {}
        self._clean: set[Hashable] = set()
        self._tries: Counter[Hashable] = Counter()
        self._last: float | None = None

    def rounds(self, kind: Hashable) -> int:
        """Of the next call, which is of some kind: rounds of one kind cost alike."""
        return max(1, min(self._most, round(self._wanted / self.costs[kind]))) if kind in self.costs else 1

    def knows(self, kind: Hashable) -> bool:
        """Whether its cost has been measured alone, or so often that this is not to be had."""
        return kind in self._clean or self._tries[kind] >= _PATIENCE

    def settled(self, kind: Hashable, rounds: int, at_once: bool, alone: bool) -> None:
        """A call of so many rounds has ended; it began when the one before ended if it came `at_once`.

        If it did not run `alone`, for texts were read before it, it counts only until one has.
        """
        now = perf_counter()
        if at_once and self._last is not None and rounds and (alone or kind not in self._clean):
            each = (now - self._last) / rounds
            before = each if alone and kind not in self._clean else self.costs.get(kind, each)
            self.costs[kind] = _MEMORY * before + (1 - _MEMORY) * each
            self._tries[kind] += 1
            if alone:
                self._clean.add(kind)
        self._last = now
