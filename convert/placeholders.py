"""Detect placeholders that replace the expected file: git-lfs pointers, web pages and broken links."""

import codecs
from pathlib import Path

from convert.errors import CheckpointError

_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = b"<!doctype html", b"<html", b"<?xml"
# Hub error responses that `curl` or `wget` save as if they were the file.
_ANSWERS = (
    *(b"access to model ", b"entry not found", b"repository not found", b"invalid username or password"),
    *(b"not found", b'{"error'),
)


def check(path: Path) -> None:
    """Raise CheckpointError if `path` is not the file itself. Call this after a failed read to give a clearer error.

    Raises:
        CheckpointError: `path` is a git-lfs pointer, a web page, or a link to a file that does not exist.
    """
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} is a link to {path.readlink()}, which does not exist; copy the folder with `cp -rL`, which copies "
            "files in place of links, or download it again."
        )
    try:
        with path.open("rb") as stream:
            start = stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip().lower()
    except OSError:
        return
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{path} is a git-lfs pointer and not the file itself; run `git lfs pull` in the clone, or download the "
            "file from the model's page."
        )
    if start.startswith((*_PAGES, *_ANSWERS)):
        raise CheckpointError(
            f"{path} is a web page or message and not the file itself; download the file again, after `hf auth login` "
            "if the model is gated."
        )
