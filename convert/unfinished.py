"""What is being written, and is deleted unless it was finished: also where a process ends without unwinding."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_folders: set[Path] = set()


@contextmanager
def deleted_in_the_end(folder: Path) -> Iterator[None]:
    """Deletes `folder`, to be created in this block, when the block ends; what was moved away from it stays."""
    _folders.add(folder)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


def delete() -> None:
    """Deletes all such folders, for a process that is about to end in the middle of their blocks."""
    for folder in tuple(_folders):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # a thread may have been writing into it
