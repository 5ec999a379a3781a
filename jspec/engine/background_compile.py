"""Background compilation of programs that few requests need, at their first use."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jspec.engine.memory_budget import give_back

_LOG = logging.getLogger("jspec")


class Compiler:
    """A thread that runs one step after another. A process that exits waits for the running step.

    Args:
        steps: returns the steps; called when the compiler begins.
        notice: called whenever a step has ended.
    """

    def __init__(self, steps: Callable[[], Sequence[Callable[[], Any]]], notice: Callable[[], None]):
        self._steps, self._notice = steps, notice
        self._thread = ThreadPoolExecutor(1, "jspec compiles")
        self._under_way: list[Future[Any]] | None = None

    def begin(self) -> None:
        """Run the steps, unless they are running already."""
        if self._under_way is None or self.is_done:
            steps = self._steps()
            self._under_way = [self._thread.submit(step) for step in (*steps, *[give_back] * bool(steps))]
            for one in self._under_way:
                one.add_done_callback(self._has_ended)

    @property
    def is_done(self) -> bool:
        """Whether it has begun and no step is left."""
        return self._under_way is not None and all(one.done() for one in self._under_way)

    @property
    def error(self) -> str:
        """The first error so far; empty if there is none."""
        found = [one.exception() for one in self._under_way or () if one.done() and not one.cancelled()]
        return next((f"{type(error).__name__}: {error}" for error in found if error), "")

    def _has_ended(self, step: Future[Any]) -> None:
        self._notice()
        if not step.cancelled() and (error := step.exception()):
            _LOG.error("A program cannot be compiled.", exc_info=error)

    def close(self) -> None:
        """Start no more steps. Do not wait for the running one."""
        self._thread.shutdown(wait=False, cancel_futures=True)
