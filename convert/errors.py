"""The one exception of this package, how it lists names, and how it tells what other libraries report."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says what is wrong, what was expected, how to fix it."""


def listing(names: Iterable[str], limit: int = 4) -> str:
    """`names` sorted and comma separated, cut after `limit`: a 70B model can miss 723 of them."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + rest


def brief(error: Exception) -> str:
    """The first line of an error from another library, at most 200 characters; some append their whole state."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


@contextmanager
def raised_alone() -> Iterator[None]:
    """What Orbax raises in this block it does not also log as errors, as it would from every thread and with traces."""

    def no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    log = logging.getLogger("absl")
    log.addFilter(no_error)
    try:
        yield
    finally:
        log.removeFilter(no_error)
