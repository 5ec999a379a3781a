"""What rounds cost; and how many to play a call: enough for calls to cost little, and so few that nobody waits long."""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from time import perf_counter

_KEPT = 9  # calls of a kind, whose median counts: one that was disturbed chooses nothing
_NEAR = 4  # calls, in which the machine is taken to be the same
_PATIENCE = 8  # calls
_OLD = 32  # calls of a kind without one that ran alone


class Pace:
    """Counts a call's rounds so that it takes about `seconds`; on a fast device many, on a slow one a single one.

    A machine that others use, too, is slower for seconds on end. So a kind is measured against the others that were
    played just before, and one that is not played keeps its place among those that are.

    Attributes:
        costs: of a round, by kind, of those that have been measured; for each other only: not in seconds of any moment.
    """

    def __init__(self, most: int, seconds: float):
        self._most, self._wanted = most, seconds
        self.costs: dict[Hashable, float] = {}
        self._readings: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))  # seconds
        self._shares: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))  # beside others
        self._lately: deque[tuple[Hashable, float]] = deque(maxlen=_NEAR)  # seconds of any kind
        self._clean: set[Hashable] = set()
        self._tries: Counter[Hashable] = Counter()
        self._since: Counter[Hashable] = Counter()
        self._last: float | None = None

    def rounds(self, kind: Hashable) -> int:
        """Of the next call, which is of some kind: rounds of one kind cost alike."""
        if kind not in self._readings:
            return 1
        return max(1, min(self._most, round(self._wanted / statistics.median(self._readings[kind]))))

    def knows(self, kind: Hashable) -> bool:
        """Whether its cost has been measured alone, or so often that this is not to be had."""
        return kind in self._clean or self._tries[kind] >= _PATIENCE

    def is_stale(self, kind: Hashable) -> bool:
        """Whether so many calls of a kind have said nothing of its cost, which was known: none of them ran alone.

        Then for one call, and again after as many: it may come to nothing.
        """
        return kind in self._clean and self._since[kind] % _OLD == _OLD - 1

    def pause(self) -> None:
        """What passes until the next call ends is not its own time."""
        self._last = None

    def settled(self, kind: Hashable, rounds: int, at_once: bool, alone: bool) -> None:
        """A call of so many rounds has ended; it began when the one before ended if it came `at_once`.

        If it did not run `alone`, for texts were read before it, it counts only until one has.
        """
        now = perf_counter()
        self._since[kind] += 1
        if at_once and self._last is not None and rounds and (alone or kind not in self._clean):
            if alone and kind not in self._clean:
                for known in (self._readings, self._shares, self.costs):
                    known.pop(kind, None)
            self.learn(kind, (now - self._last) / rounds, alone)
        self._last = now

    def learn(self, kind: Hashable, seconds: float, alone: bool = True) -> None:
        """What a round of some kind has cost."""
        if alone:
            self._clean.add(kind)
            self._since[kind] = 0
        self._readings[kind].append(seconds)
        self._tries[kind] += 1
        others = [passed / self.costs[other] for other, passed in self._lately if other != kind]
        if others or kind not in self._shares:  # else a slower machine would look like a dearer kind
            share = seconds / statistics.median(others or [1.0])
            # Half the way, for the others' costs may be as wrong, and are next to be measured against this one's.
            self._shares[kind].append(math.sqrt(share * self.costs.get(kind, share)))
            self.costs[kind] = statistics.median(self._shares[kind])
        if alone:
            self._lately.append((kind, seconds))
