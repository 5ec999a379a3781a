"""The number of rounds per call: enough to make the overhead small, and few enough to keep waiting times short."""

import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from time import perf_counter

_KEPT = 9  # recent calls of a kind. Their median counts, so that a single disturbed call has no effect
_PATIENCE = 8  # calls after which a disturbed measurement counts
_GLANCE = 0.25  # fraction of a call's time that may pass without a check for its end
_OLD = 32  # consecutive calls of a kind, none of them alone, after which its cost is stale


class Pace:
    """A budget of rounds that makes a call take about `seconds`: many rounds on a fast device, one on a slow device.

    Attributes:
        costs: seconds per round, for each kind that has been measured.
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
        """Return the number of rounds for the next call of a kind. Rounds of one kind cost about the same."""
        return max(1, min(self._most, round(self._wanted / self.costs[kind]))) if kind in self.costs else 1

    def knows(self, kind: Hashable) -> bool:
        """Return whether a kind's cost was measured alone, or so often that measuring it alone seems impossible."""
        return kind in self._clean or self._tries[kind] >= _PATIENCE

    def is_stale(self, kind: Hashable) -> bool:
        """Return whether a kind's known cost is stale, because many calls in a row did not run alone.

        This is true for one call, and again after the same number of calls, because that call may not run alone either.
        """
        return kind in self._clean and self._since[kind] % _OLD == _OLD - 1

    def away(self, seconds: float) -> None:
        """Record `seconds` without a check for the end of the running call. If they are many, discard its cost."""
        self._away += seconds

    def settled(self, kind: Hashable, rounds: int, at_once: bool, alone: bool) -> None:
        """Record the end of a call of `rounds` rounds. If `at_once`, it began when the previous call ended.

        A call that did not run `alone`, because of prefill before it, counts only until one has run alone.
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
        """Record the cost of one round of a kind. A round that did not run `alone` counts only until one has."""
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
