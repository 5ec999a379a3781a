"""Heartbeats, which show whether short pieces of work finish in time."""

import time
from collections.abc import Generator
from contextlib import contextmanager

PATIENCE = 60.0  # seconds that any piece of work may take
_TIMES = 10  # a piece may take this many times as long as the longest piece so far


class Heartbeat:
    """A timer for pieces of work. One thread or one event loop does the work; any thread may read the timer."""

    def __init__(self) -> None:
        self._running, self._last, self._longest = 0, 0.0, 0.0

    @contextmanager
    def beat(self) -> Generator[None, None, None]:
        """Time the block as a piece of work. If pieces overlap, time each from the end of the previous one."""
        if not self._running:
            self._last = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            now = time.monotonic()
            self._running -= 1
            self._longest, self._last = max(self._longest, now - self._last), now

    @property
    def overdue(self) -> float:
        """The seconds since the last piece ended, if another piece should have ended by now; otherwise 0."""
        seconds = time.monotonic() - self._last if self._running else 0.0
        return seconds if seconds > max(PATIENCE, _TIMES * self._longest) else 0.0
