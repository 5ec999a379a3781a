"""How many rounds to play a call: enough for calls to cost little, and so few that nobody waits long for the next."""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from time import perf_counter

_KEPT = 9  # calls of a kind, whose median counts: one that was disturbed chooses nothing
_PATIENCE = 8  # calls
_GLANCE = 0.25  # of a call's time
_OLD = 32  # calls of a kind without one that ran alone


class Pace:
    """Counts a call's rounds so that it takes about `seconds`; on a fast device many, on a slow one a single one.

    Attributes:
        costs: seconds a round, by kind; of those that have been measured.
    """

    def __init__(self, most: int, seconds: float):
        self._most, self._wanted = most, seconds
        self.costs: dict[Hashable, float] = {}
        self._readings: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._clean: set[Hashable] = set()
        self._tries: Counter[Hashable] = Counter()
        self._since: Counter[Hashable] = Counter()
        self._last: float | None = None
        self._away = 0.0

    def rounds(self, kind: Hashable) -> int:
        """Of the next call, which is of some kind: rounds of one kind cost alike."""
        return max(1, min(self._most, round(self._wanted / self.costs[kind]))) if kind in self.costs else 1

    def knows(self, kind: Hashable) -> bool:
        """Whether its cost has been measured alone, or so often that this is not to be had."""
        return kind in self._clean or self._tries[kind] >= _PATIENCE

    def is_stale(self, kind: Hashable) -> bool:
        """Whether so many calls of a kind have said nothing of its cost, which was known: none of them ran alone.

        Then for one call, and again after as many: it may come to nothing.
        """
        return kind in self._clean and self._since[kind] % _OLD == _OLD - 1

    def away(self, seconds: float) -> None:
        """So long nobody looked whether the call under way had ended: if that is long, it says nothing of its cost."""
        self._away += seconds

    def settled(self, kind: Hashable, rounds: int, at_once: bool, alone: bool) -> None:
        """A call of so many rounds has ended; it began when the one before ended if it came `at_once`.

        If it did not run `alone`, for texts were read before it, it counts only until one has.
        """
        now, away = perf_counter(), self._away
        self._since[kind] += 1
        self._away = 0.0
        if self._last is None or away > _GLANCE * (now - self._last):
            self._last = now
            return
        if at_once and rounds:
            self.learn(kind, (now - self._last) / rounds, alone)
        self._last = now

    def learn(self, kind: Hashable, seconds: float, alone: bool = True) -> None:
        """What a round of some kind has cost; if not `alone`, that counts only until one such has been."""
        if not alone and kind in self._clean:
            return
        if alone:
            if kind not in self._clean:
                self._readings[kind].clear()
            self._clean.add(kind)
            self._since[kind] = 0
        self._readings[kind].append(seconds)
        self.costs[kind] = statistics.median(self._readings[kind])
        self._tries[kind] += 1
