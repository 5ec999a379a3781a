"""The number of rounds per call: enough to make the overhead small, and few enough to keep waiting times short."""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Hashable
from time import perf_counter

_NUM_MEASUREMENTS = 9  # recent calls to keep per kind. Their median is used, so that one disturbed call has no effect
_PATIENCE = 8  # number of measurements of a kind after which even disturbed ones count
_MAX_EXCLUDED = 0.25  # fraction of a call's time that may pass without a check for its end
_STALE_AFTER = 32  # consecutive calls of a kind after which its cost is stale, if none of them ran alone


class RoundBudget:
    """A budget of rounds that makes a call take about `seconds`: many rounds on a fast device, one on a slow device.

    Attributes:
        costs: seconds per round, for each kind that has been measured.
    """

    def __init__(self, max_rounds: int, seconds: float):
        self._max_rounds, self._target_seconds = max_rounds, seconds
        self.costs: dict[Hashable, float] = {}
        self._measurements: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_MEASUREMENTS))
        self._measured_alone: set[Hashable] = set()
        self._num_measured: Counter[Hashable] = Counter()
        self._calls_since: Counter[Hashable] = Counter()
        self._last_end, self._excluded = -math.inf, 0.0

    def rounds(self, kind: Hashable) -> int:
        """Return the number of rounds for the next call of a kind. Rounds of one kind cost about the same."""
        return (
            max(1, min(self._max_rounds, round(self._target_seconds / self.costs[kind]))) if kind in self.costs else 1
        )

    def is_measured(self, kind: Hashable, times: int = 1) -> bool:
        """Return whether a kind's cost was measured often enough, and alone.

        It must have been measured at least `times` times. Measurements that were not alone suffice if there are many,
        because measuring alone then seems impossible.
        """
        count = self._num_measured[kind]
        return count >= times and (kind in self._measured_alone or count >= _PATIENCE)

    def is_stale(self, kind: Hashable) -> bool:
        """Return whether a kind's known cost is stale, because many calls in a row did not run alone.

        This is true for one call, and again after the same number of calls, because that call may not run alone either.
        """
        return kind in self._measured_alone and self._calls_since[kind] % _STALE_AFTER == _STALE_AFTER - 1

    def exclude_time(self, seconds: float) -> None:
        """Record `seconds` in which the running call's end was not checked.

        If these make up too much of the call's time, `record_call` ignores the call.
        """
        self._excluded += seconds

    def record_call(self, kind: Hashable, rounds: int, dispatched_at: float, alone: bool) -> None:
        """Record the end of a call of `rounds` rounds. It began at its dispatch, or when the previous call ended.

        A call that did not run `alone`, because of prefill before it, counts only until another call has run alone.
        """
        now, excluded = perf_counter(), self._excluded
        seconds = now - max(dispatched_at, self._last_end)
        self._calls_since[kind] += 1
        self._last_end, self._excluded = now, 0.0
        if rounds and excluded <= _MAX_EXCLUDED * seconds:
            self.record(kind, seconds / rounds, alone)

    def record(self, kind: Hashable, seconds: float, alone: bool = True) -> None:
        """Record a kind's cost per round. Use a call that did not run `alone` only until another call has run alone.

        A kind's first call never counts as alone, because a program's first call takes longer than later ones.
        """
        alone = alone and self._num_measured[kind] > 0
        if not alone and kind in self._measured_alone:
            return
        if alone:
            if kind not in self._measured_alone:
                self._measurements[kind].clear()
            self._measured_alone.add(kind)
            self._calls_since[kind] = 0
        self._measurements[kind].append(seconds)
        self.costs[kind] = statistics.median(self._measurements[kind])
        self._num_measured[kind] += 1
