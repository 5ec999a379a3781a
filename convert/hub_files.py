"""GGUF files in Hugging Face repos: sources such as `org/repo:file.gguf`, and the files in the local cache."""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from convert.errors import CheckpointError, listing

_SPELLING = re.compile(r"([^:]*):(.*)", re.DOTALL)
_SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A GGUF file in a Hugging Face repo. `name` includes the folders in the repo, if any."""

    repo_id: str
    name: str

    def __str__(self) -> str:
        return f"{self.repo_id}:{self.name}"


def parse(source: str) -> HubFile | None:
    """Return the file that `source` names, or None if `source` is a repo id without a colon.

    Raises:
        CheckpointError: the text after the colon does not name a whole GGUF file.
    """
    spelled = _SPELLING.fullmatch(source)
    if spelled is None:
        return None
    repo_id, name = spelled.groups()
    if not name.lower().endswith(_SUFFIX) or "\\" in name or {"", ".", ".."} & {*name.split("/")}:
        raise CheckpointError(
            f"{source} is neither a local file nor a GGUF file in a Hugging Face repo; write '{repo_id}:file.gguf' "
            f"with a file listed on {page(repo_id)}/tree/main."
        )
    if part := _part(name):
        stem, count = part
        raise CheckpointError(
            f"{source} is one of {count} parts; download all parts with `hf download {repo_id} --include "
            f"'{stem}-*.gguf'`, join them with `llama-gguf-split --merge FIRST_PART OUT.gguf` and pass OUT.gguf."
        )
    return HubFile(repo_id, name)


def page(repo_id: str) -> str:
    """Return the address of a repo's page."""
    return f"https://huggingface.co/{repo_id}"


def choices(repo_id: str, names: Iterable[str]) -> str | None:
    """Return the part of an error message that lists a repo's GGUF files, or None if there are none."""
    found = sorted(name for name in names if name.lower().endswith(_SUFFIX))
    whole = [name for name in found if _part(name) is None]
    if whole:
        return f"the GGUF files {listing(whole, 12)}; name one of them, as in '{repo_id}:{whole[0]}'"
    if found:
        return (
            f"GGUF files in parts ({listing(found)}); download all parts of one file, join them with "
            "`llama-gguf-split --merge FIRST_PART OUT.gguf` and pass OUT.gguf"
        )
    return None


def cached() -> dict[HubFile, Path]:
    """Return the local paths of the cached GGUF files that a source can name. Files in parts are left out.

    Only the newest downloaded state of each repo's main branch counts, because a source without a revision means that
    branch.
    """
    from huggingface_hub import constants, errors, scan_cache_dir  # lazily, because importing it takes half a second

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (errors.CacheNotFound, ValueError):  # ValueError: the cache is not a directory
        return {}
    files = {
        HubFile(repo.repo_id, file.file_path.relative_to(revision.snapshot_path).as_posix()): file.file_path
        for repo in repos
        if repo.repo_type == "model"
        for revision in repo.revisions
        if constants.DEFAULT_REVISION in revision.refs
        for file in revision.files
    }
    whole = [file for file in files if file.name.lower().endswith(_SUFFIX) and _part(file.name) is None]
    return {file: files[file] for file in sorted(whole, key=str)}


def _part(name: str) -> tuple[str, int] | None:
    """Return the prefix that a file's parts share and the number of parts, or None for a whole file."""
    part = _PART.fullmatch(name)
    return (part[1], int(part[2])) if part and int(part[2]) > 1 else None
