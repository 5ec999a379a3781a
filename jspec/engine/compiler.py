"""Programs that few need: compiled beside whatever runs, when somebody first does."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jspec.engine.room import give_back

_LOG = logging.getLogger("jspec")


class Compiler:
    """A thread that does one step after another.

    Args:
        steps: tells them, when it begins.
        notice: is called whenever one has ended.
    """

    def __init__(self, steps: Callable[[], Sequence[Callable[[], Any]]], notice: Callable[[], None]):
        self._steps, self._notice = steps, notice
        self._thread = ThreadPoolExecutor(1, "jspec compiles")
        self._under_way: list[Future[Any]] | None = None

    def begin(self) -> None:
        """Do them, unless that has been said; again if one has failed."""
        if self._under_way is None:
            steps = self._steps()
            self._under_way = [self._thread.submit(step) for step in (*steps, *[give_back] * bool(steps))]
            for one in self._under_way:
                one.add_done_callback(lambda _: self._notice())

    @property
    def is_done(self) -> bool:
        """Whether it has begun and nothing is left to do."""
        return self._under_way is not None and all(one.done() for one in self._under_way)

    def failure(self) -> str:
        """What has gone wrong, of one that is done; told once, for then it has not begun. Else nothing."""
        errors = [one.exception() for one in self._under_way or () if not one.cancelled()]
        if not any(errors):
            return ""
        error = next(filter(None, errors))
        _LOG.error("A program cannot be compiled.", exc_info=error)
        self._under_way = None
        return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Begin no other step; the one under way goes on, and nobody waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
