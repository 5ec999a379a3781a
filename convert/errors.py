"""The exception of this package, with helpers that list names and shorten errors of other libraries."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message says what is wrong, what was expected and how to fix it."""


def listing(names: Iterable[str], limit: int = 4) -> str:
    """Return `names` sorted and separated by commas, cut after `limit`: a 70B model can lack 723 tensors."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


def brief(error: Exception) -> str:
    """Return the first line of another library's error, at most 200 characters: some append their whole state."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


@contextmanager
def raised_alone() -> Iterator[None]:
    """Drop the error logs of Orbax in this block: it would log from every thread, with traces, what it also raises."""

    def no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    log = logging.getLogger("absl")
    log.addFilter(no_error)
    try:
        yield
    finally:
        log.removeFilter(no_error)
