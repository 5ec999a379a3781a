# pyright: reportUnknownVariableType=false
"""Resolution of checkpoint sources: local directories and GGUF files, model names, and Hugging Face repo ids."""

import re
from pathlib import Path

from convert import hub_names as names
from convert import placeholders
from convert.errors import CheckpointError, brief
from convert.gguf.header import MAGIC

PARTIAL = ".partial-"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_CONFIG = ["config.json"]
_WANTED = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt"]
# A checkpoint is in the root of its repository. Folders (original/, onnx/) hold copies of the same weights.
_UNWANTED = ["*/*", "*.bin", "consolidated*"]


def resolve(source: str | Path, revision: str | None = None) -> Path:
    """Return the local path of `source`.

    A `source` that exists is returned unchanged. Otherwise, it is resolved as a model name (`convert.hub_names`) or a
    Hugging Face repo id `org/name`. A named model is downloaded only if it is not found on this machine.

    Raises:
        CheckpointError: `source` is not a directory, a GGUF file, or a name or repo id that can be downloaded; or
            `revision` is set for a local source.
    """
    return _find(source, revision, _WANTED)


def resolve_config(source: str | Path) -> Path:
    """Resolve `source` for `convert.read_config` alone. From the Hugging Face Hub, download only config.json.

    Raises:
        CheckpointError: under the same conditions as `resolve`.
    """
    return _find(source, None, _CONFIG)


def _find(source: str | Path, revision: str | None, wanted: list[str]) -> Path:
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
        return _named(str(source), revision, wanted)
    if not isinstance(source, str) or not _HUB_ID.fullmatch(source):
        raise CheckpointError(names.unknown(str(source)))
    return _download(source, revision, wanted)


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


def _named(name: str, revision: str | None, wanted: list[str]) -> Path:
    model = names.MODELS[name]
    command = f"hf download {model.repo_id} config.json" if wanted is _CONFIG else model.command
    if revision is None and (found := names.find(name)):
        return found
    try:
        return _download(model.repo_id, revision, wanted)
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


def _download(repo_id: str, revision: str | None, wanted: list[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download  # lazily, because importing it takes half a second

    name = repo_id if revision is None else f"{repo_id} at revision {revision}"
    page = f"https://huggingface.co/{repo_id}"
    try:
        return Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=list(wanted), ignore_patterns=_UNWANTED)
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated; accept the licence on the model's page, {page}, and set HF_TOKEN to a "
            "token of that account."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} does not exist; choose a branch, tag or commit listed on {page}.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"{name} is neither a directory nor a model on the hub; check the spelling, and set "
            "HF_TOKEN if the model is private."
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.RevisionResolutionError,
    ) as error:
        online = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "go online"
        raise CheckpointError(
            f"{name} is neither a directory nor in the local cache, and the hub cannot be reached; "
            f"{online} or pass a directory."
        ) from error
    except Exception as error:  # the client passes on errors of its HTTP library
        raise CheckpointError(
            f"{name} could not be downloaded ({brief(error)}); try again, it continues where it stopped."
        ) from error
