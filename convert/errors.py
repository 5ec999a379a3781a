"""This package's exception, and helpers that list names and shorten other libraries' error messages."""

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager


class CheckpointError(ValueError):
    """An error for an unusable checkpoint. The message says what is wrong, what was expected and how to fix it."""


def listing(names: Iterable[str], limit: int = 4) -> str:
    """Return `names` sorted, comma-separated and cut after `limit`, because a 70B model can lack 723 tensors."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


def brief(error: Exception) -> str:
    """Return the first 200 characters of an error's first line, because some libraries append their whole state."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


@contextmanager
def raised_alone() -> Generator[None]:
    """Suppress Orbax's error logs in this block, because its threads log tracebacks of errors that it also raises."""

    def no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    log = logging.getLogger("absl")
    log.addFilter(no_error)
    try:
        yield
    finally:
        log.removeFilter(no_error)
