"""How many rounds to play a call: enough for calls to cost little, and so few that nobody waits long for the next."""

from time import perf_counter

_MEMORY = 0.8


class Pace:
    """Counts a call's rounds so that it takes about `seconds`; on a fast device many, on a slow one a single one."""

    def __init__(self, most: int, seconds: float):
        self._most, self._wanted = most, seconds
        self._each: float | None = None  # seconds a round
        self._last: float | None = None

    def rounds(self) -> int:
        """Of the next call."""
        return 1 if self._each is None else max(1, min(self._most, round(self._wanted / self._each)))

    def settled(self, rounds: int, at_once: bool) -> None:
        """A call of so many rounds has ended; it began when the one before ended if it came `at_once`."""
        now = perf_counter()
        if at_once and self._last is not None and rounds:
            each = (now - self._last) / rounds
            self._each = each if self._each is None else _MEMORY * self._each + (1 - _MEMORY) * each
        self._last = now
