"""A queue in front of the replicas, in which moved requests go first."""

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import AsyncGenerator, Callable


class Admission:
    """Limit the number of requests that are sent to replicas, and let moved requests go first.

    Without a limit, a moved request would compete with all waiting requests for the next free slot.

    Args:
        limit: a function that returns the maximum number of requests. Call `admit` when it grows.
    """

    def __init__(self, limit: Callable[[], int]):
        self._limit, self._num_sent = limit, 0
        self._waiting, self._numbers = list[tuple[bool, int, asyncio.Future[None]]](), itertools.count()

    @contextlib.asynccontextmanager
    async def place(self, has_moved: bool) -> AsyncGenerator[None]:
        """Wait for a place, and hold it during the block."""
        waiting = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (not has_moved, next(self._numbers), waiting))
        self.admit()
        try:
            await waiting
            yield
        finally:
            if waiting.done() and not waiting.cancelled():  # a task may be cancelled just when it gets its place
                self._num_sent -= 1
                self.admit()

    def admit(self) -> None:
        """Give free places to waiting requests."""
        while self._waiting and self._num_sent < self._limit():
            *_, waiting = heapq.heappop(self._waiting)
            if not waiting.done():
                self._num_sent += 1
                waiting.set_result(None)
