"""What is being written, and is deleted unless it was finished: also where a process ends without unwinding."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_folders: set[Path] = set()
_PAUSES = 0.01, 0.1, 1.0  # seconds


@contextmanager
def deleted_in_the_end(folder: Path) -> Iterator[None]:
    """Deletes `folder`, to be created in this block, when the block ends; what was moved away from it stays."""
    _folders.add(folder)
    try:
        yield
    finally:
        remove(folder)
        _folders.discard(folder)


def delete() -> None:
    """Deletes all such folders, for a process that is about to end in the middle of their blocks.

    Each gets another name first, so that its block cannot finish what is being emptied.
    """
    for folder in tuple(_folders):
        doomed = folder.with_name(f"{folder.name}.deleted")
        with suppress(OSError):  # it was finished, or is not there yet
            folder.rename(doomed)
        for left in (doomed, folder):  # a thread may have been about to write into it
            remove(left)


def remove(folder: Path) -> None:
    """A library's threads may write into it for a moment after one of them has failed: then again."""
    for pause in _PAUSES:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(pause)
