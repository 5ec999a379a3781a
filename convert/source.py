"""Resolve checkpoint sources: local directories and GGUF files, model names, and Hugging Face repos."""

import dataclasses
import re
from pathlib import Path

from convert import hub_download, hub_files, placeholders
from convert import hub_names as names
from convert.errors import CheckpointError
from convert.gguf.header import MAGIC

PARTIAL = ".partial-"
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:.*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class _Patterns:
    """Patterns of file names in a repo.

    Attributes:
        wanted: the files to download.
        needed: the files of which at least one must exist if the repo has GGUF files.
    """

    wanted: tuple[str, ...]
    needed: tuple[str, ...]


_WANTED = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt")
_ANY = _Patterns(_WANTED, ("*.safetensors", "tokenizer*"))
_WEIGHTS = _Patterns(_WANTED, ("*.safetensors",))
_CONFIG = _Patterns(("config.json",), ("config.json",))


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """Return the local path of `source`.

    A `source` that exists is returned unchanged. Otherwise, it is resolved as a model name (`convert.hub_names`), a
    Hugging Face repo id `org/repo`, or a GGUF file in such a repo, `org/repo:file.gguf`. A file is downloaded without
    the rest of its repo. A named model is downloaded only if it is not found on this machine.

    Raises:
        CheckpointError: `source` is not a directory, a GGUF file, or a name, repo id or file that can be downloaded; or
            `revision` is set for a local source.
    """
    return _find(source, revision, _ANY)


def resolve_weights(source: str | Path, revision: str | None = None) -> Path:
    """Resolve `source` for reading weights. Also reject a repo whose weights are only in GGUF files.

    Raises:
        CheckpointError: under the same conditions as `resolve`, or if one of the repo's GGUF files must be named.
    """
    return _find(source, revision, _WEIGHTS)


def resolve_config(source: str | Path) -> Path:
    """Resolve `source` for `convert.read_config` alone.

    From the Hugging Face Hub, download only config.json, or the GGUF file that `source` names.

    Raises:
        CheckpointError: under the same conditions as `resolve`.
    """
    return _find(source, None, _CONFIG)


def _find(source: str | Path, revision: str | None, patterns: _Patterns) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        return _local(path, revision)
    if path.is_file() and (is_gguf(path) or path.suffix.lower() == ".gguf"):
        return _unrevised(path, revision)  # a file that only has the suffix is rejected later, by its content
    if path.exists() or path.is_symlink():
        placeholders.check(path)
        raise CheckpointError(
            f"{path} is a file; expected the directory that holds config.json and the weights, or a GGUF file."
        )
    if source in names.MODELS:
        return _named(str(source), revision, patterns)
    if not isinstance(source, str) or not _ON_HUB.fullmatch(source):
        raise CheckpointError(names.unknown(str(source)))
    return _from_hub(source, revision, patterns)


def _from_hub(source: str, revision: str | None, patterns: _Patterns) -> Path:
    file = hub_files.parse(source)
    if file is not None:
        return hub_download.file(file, revision)
    return hub_download.snapshot(source, revision, patterns.wanted, patterns.needed)


def is_repo_id(source: str) -> bool:
    """Return whether `resolve` would look for `source` on the Hugging Face Hub."""
    is_local = source in names.MODELS or Path(source).expanduser().exists()
    return not is_local and _ON_HUB.fullmatch(source) is not None and hub_files.parse(source) is None


def is_gguf(path: Path) -> bool:
    """Return whether a file starts with the GGUF magic bytes, regardless of its name.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); check its permissions.") from error


def _named(name: str, revision: str | None, patterns: _Patterns) -> Path:
    model = names.MODELS[name]
    only_config = patterns is _CONFIG and model.file is None
    command = f"hf download {model.repo_id} config.json" if only_config else model.command
    if revision is None and (found := names.find(name)):
        return found
    try:
        return _from_hub(model.source, revision, patterns)
    except CheckpointError as error:
        raise CheckpointError(
            f"{name} is not on this machine, and the hub did not provide it; get it with `{command}`: {error}"
        ) from error


def _unrevised(path: Path, revision: str | None) -> Path:
    if revision is not None:
        kind = "directory" if path.is_dir() else "file"
        raise CheckpointError(
            f"revision {revision!r} was passed with the {kind} {path}; only Hugging Face repo ids have revisions, so "
            "leave it out."
        )
    return path


def _local(path: Path, revision: str | None) -> Path:
    _unrevised(path, revision)
    if PARTIAL in path.resolve().name:
        raise CheckpointError(f"{path} was left by a conversion that was stopped; delete it and convert again.")
    try:
        empty = not any(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be listed ({error}); check its permissions.") from error
    if empty:
        raise CheckpointError(f"{path} is empty; expected config.json and *.safetensors, or a converted checkpoint.")
    return path
