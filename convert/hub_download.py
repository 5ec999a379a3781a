# pyright: reportUnknownVariableType=false
"""Downloads from the Hugging Face Hub. Every failure becomes a one-sentence error."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from convert import hub_files
from convert.errors import CheckpointError, brief

# A checkpoint is in the root of its repository. Folders (original/, onnx/) hold copies of the same weights.
_UNWANTED = ["*/*", "*.bin", "consolidated*"]


def snapshot(repo_id: str, revision: str | None, wanted: Sequence[str], needed: Sequence[str]) -> Path:
    """Download the files of a repo that match the patterns in `wanted`, and return their local directory.

    Raises:
        CheckpointError: the download failed; or the repo has GGUF files, but no file matches a pattern in `needed`.
    """
    from huggingface_hub import snapshot_download  # lazily, because importing it takes half a second

    name = _named(repo_id, revision)
    with _one_sentence(name, repo_id, "directory"):
        directory = Path(
            snapshot_download(repo_id, revision=revision, allow_patterns=list(wanted), ignore_patterns=_UNWANTED)
        )
    if any(file for pattern in needed for file in directory.glob(pattern)):
        return directory
    names = _file_names(repo_id, revision)
    if names is None:
        names = [found.relative_to(directory).as_posix() for found in directory.rglob("*")]
    if choices := hub_files.choices(repo_id, names):
        raise CheckpointError(f"{name} has no {needed[0]} file, but has {choices}.")
    return directory


def file(source: hub_files.HubFile, revision: str | None) -> Path:
    """Download one file of a repo, and return its local path.

    Raises:
        CheckpointError: the download failed, or the repo has no such file.
    """
    from huggingface_hub import errors, hf_hub_download  # lazily, because importing it takes half a second

    with _one_sentence(_named(str(source), revision), source.repo_id, "file"):
        try:
            return Path(hf_hub_download(source.repo_id, source.name, revision=revision))
        except errors.LocalEntryNotFoundError:  # a subclass of EntryNotFoundError, raised without asking the hub
            raise
        except errors.EntryNotFoundError as error:
            others = _others(source.repo_id, _file_names(source.repo_id, revision))
            raise CheckpointError(f"{_named(source.repo_id, revision)} has no file {source.name}{others}.") from error


def _named(source: str, revision: str | None) -> str:
    return source if revision is None else f"{source} at revision {revision}"


def _others(repo_id: str, names: list[str] | None) -> str:
    """Return the end of the error message for a missing file. `names` lists the repo's files, if known."""
    if names is None:
        return f"; check its name on {hub_files.page(repo_id)}/tree/main"
    choices = hub_files.choices(repo_id, names)
    return f", but has {choices}" if choices else ", and no other GGUF file; choose another repo"


def _file_names(repo_id: str, revision: str | None) -> list[str] | None:
    """Return the names of a repo's files, or None if the hub does not list them."""
    from huggingface_hub import list_repo_files

    try:
        return list_repo_files(repo_id, revision=revision)
    except Exception:  # the list only improves an error message
        return None


@contextmanager
def _one_sentence(name: str, repo_id: str, kind: str) -> Generator[None]:
    """Turn every error of the hub's client in this block into a CheckpointError that says what to do.

    Args:
        name: the source, with its revision.
        kind: the local equivalent of the source: "directory" or "file".
    """
    from huggingface_hub import constants, errors

    page = hub_files.page(repo_id)
    try:
        yield
    except CheckpointError:
        raise
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated; accept the licence on the model's page, {page}, and set HF_TOKEN to a "
            "token of that account."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} does not exist; choose a branch, tag or commit listed on {page}.") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        on_hub = "a model on the hub" if kind == "directory" else "in a model repo on the hub"
        raise CheckpointError(
            f"{name} is neither a {kind} nor {on_hub}; check the spelling, and set HF_TOKEN if the model is private."
        ) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.RevisionResolutionError,
    ) as error:
        online = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "go online"
        raise CheckpointError(
            f"{name} is neither a {kind} nor in the local cache, and the hub cannot be reached; "
            f"{online} or pass a {kind}."
        ) from error
    except Exception as error:  # the client passes on errors of its HTTP library
        raise CheckpointError(
            f"{name} could not be downloaded ({brief(error)}); try again to resume the download."
        ) from error
