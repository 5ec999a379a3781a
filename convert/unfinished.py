"""Delete unfinished folders, even if the process exits inside the block that writes them."""

import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_folders: set[Path] = set()
_PAUSES = 0.01, 0.1, 1.0  # seconds


@contextmanager
def deleted_in_the_end(folder: Path) -> Generator[None]:
    """Delete `folder`, which the block creates, when the block ends. A folder that the block renamed is kept."""
    _folders.add(folder)
    try:
        yield
    finally:
        remove(folder)
        _folders.discard(folder)


def delete() -> None:
    """Delete all unfinished folders, for a process that is about to exit inside their blocks.

    Each folder is renamed first, so that its block cannot finish a folder that is being emptied.
    """
    for folder in tuple(_folders):
        doomed = folder.with_name(f"{folder.name}.deleted")
        with suppress(OSError):  # the folder was finished, or does not exist yet
            folder.rename(doomed)
        for left in (doomed, folder):  # a thread may still write into it
            remove(left)


def remove(folder: Path) -> None:
    """Delete `folder`, retrying because a library's threads may still write into it shortly after a failure."""
    for pause in _PAUSES:
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(pause)
