"""Background compilation of rarely needed programs, at their first use."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jspec.engine.memory_budget import give_back

_LOG = logging.getLogger("jspec")


class Compiler:
    """A background thread that runs one step after another. At exit, the process waits for the running step.

    Args:
        steps: a function that returns the steps. `begin` calls it.
        notice: a function that is called whenever a step has ended.
    """

    def __init__(self, steps: Callable[[], Sequence[Callable[[], Any]]], notice: Callable[[], None]):
        self._steps, self._notice = steps, notice
        self._thread = ThreadPoolExecutor(1, "jspec compiles")
        self._under_way: list[Future[Any]] | None = None

    def begin(self) -> None:
        """Start the steps, unless they are already running."""
        if self._under_way is None or self.is_done:
            steps = self._steps()
            self._under_way = [self._thread.submit(step) for step in (*steps, *[give_back] * bool(steps))]
            for one in self._under_way:
                one.add_done_callback(self._has_ended)

    @property
    def is_done(self) -> bool:
        """Whether the steps were started and have all ended."""
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
        """Cancel the steps that have not started. Do not wait for the running one."""
        self._thread.shutdown(wait=False, cancel_futures=True)
