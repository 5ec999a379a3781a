"""Compilation of rarely needed programs in the background, when they are first needed."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jspec.engine.memory_budget import release_freed_memory

_LOG = logging.getLogger("jspec")


class Compiler:
    """A background thread that runs one step after another. At exit, the process waits for the running step.

    Args:
        steps: a function that returns the steps. `begin` calls it.
        notify: a function that is called whenever a step has ended.
    """

    def __init__(self, steps: Callable[[], Sequence[Callable[[], object]]], notify: Callable[[], None]):
        self._steps, self._notify = steps, notify
        self._thread = ThreadPoolExecutor(1, "jspec compiles")
        self._futures: list[Future[object]] | None = None

    def begin(self) -> None:
        """Start the steps, unless they are already running."""
        if self._futures is None or self.is_done:
            steps = self._steps()
            self._futures = [self._thread.submit(step) for step in (*steps, *[release_freed_memory] * bool(steps))]
            for future in self._futures:
                future.add_done_callback(self._has_ended)

    @property
    def is_done(self) -> bool:
        """Whether the steps were started and have all ended."""
        return self._futures is not None and all(future.done() for future in self._futures)

    @property
    def error(self) -> str:
        """The first error so far; empty if there is none."""
        ended = [future for future in self._futures or () if future.done() and not future.cancelled()]
        errors = [future.exception() for future in ended]
        return next((f"{type(error).__name__}: {error}" for error in errors if error), "")

    def _has_ended(self, step: Future[object]) -> None:
        self._notify()
        if not step.cancelled() and (error := step.exception()):
            _LOG.error("A program could not be compiled.", exc_info=error)

    def close(self) -> None:
        """Cancel the steps that have not started. Do not wait for the running step."""
        self._thread.shutdown(wait=False, cancel_futures=True)
