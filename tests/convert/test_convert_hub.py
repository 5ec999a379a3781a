"""Hub ids, tested without a network: the hub client is replaced or set to offline mode."""

from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

import convert
from convert import CheckpointError
from convert.source import resolve_config
from support.checkpoints import make

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch):
    """Replace the download; `hub.answer` is the directory to return or the error to raise."""

    class Hub:
        answer: Path | Exception
        call: dict | None = None

        def __call__(self, repo_id, **options):
            self.call = {"repo_id": repo_id, **options}
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    replacement = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", replacement)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo_id, revision: [])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # even if the tests run offline
    return replacement


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> Exception:
    request = httpx2.Request("GET", "https://huggingface.co/org/model")
    return kind(f"{status} error", response=httpx2.Response(status, request=request))


def test_hub_id_is_downloaded(hub, tmp_path):
    hub.answer = make(tmp_path / "snapshot")
    loaded = convert.load("org/model-1.0", revision="v2")
    assert loaded.directory == hub.answer
    assert (hub.call["repo_id"], hub.call["revision"]) == ("org/model-1.0", "v2")
    assert convert.resolve("org/model-1.0") == hub.answer


def test_only_needed_files_are_downloaded(hub, tmp_path):
    hub.answer = tmp_path
    convert.resolve("org/model")
    wanted = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
    ]
    wanted += ["model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    wanted += ["special_tokens_map.json", "chat_template.jinja", "merges.txt", "vocab.json"]
    unwanted = ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "original/consolidated.00.pth"]
    unwanted += ["original/params.json", "original/tokenizer.model", "consolidated.safetensors", "README.md"]
    unwanted += [
        "onnx/model.onnx",
        "sub/model.safetensors",
        "model.gguf",
        "training_args.bin",
        "tokenizer.bin",
    ]
    patterns = {key: hub.call[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + unwanted, **patterns)) == wanted


def test_directory_takes_precedence_over_hub(hub, tmp_path, monkeypatch):
    make(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert convert.resolve("org/model") == Path("org/model")
    assert hub.call is None


@pytest.mark.parametrize(
    "source", ["llama", "a/b/c", "/org/model", "./org/model", "../model", "~/model", "org/", "org/my model"]
)
def test_invalid_hub_id_is_not_requested(hub, source):
    with pytest.raises(CheckpointError, match="repo ids have the form"):
        convert.resolve(source)
    assert hub.call is None


def test_path_object_is_never_a_hub_id(hub):
    with pytest.raises(CheckpointError, match="repo ids have the form"):
        convert.resolve(Path("org/model"))
    assert hub.call is None


def test_revision_of_directory_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="only Hugging Face repo ids have revisions"):
        convert.load(make(tmp_path / "hf"), revision="main")


ANSWERS = {
    "gated": (
        http_error(errors.GatedRepoError, 403),
        r"accept the licence .*huggingface\.co/org/model, and set HF_TOKEN",
    ),
    "unknown": (http_error(errors.RepositoryNotFoundError, 404), "check the spelling, and set HF_TOKEN"),
    "bad token": (http_error(errors.HfHubHTTPError, 401), "401 error"),
    "bad revision": (
        http_error(errors.RevisionNotFoundError, 404),
        "at revision v2 does not exist; choose a branch",
    ),
    "bad name": (errors.HFValidationError("bad name"), "check the spelling"),
    "not cached": (errors.LocalEntryNotFoundError("not cached"), "hub cannot be reached; go online"),
    "offline": (errors.OfflineModeIsEnabled("offline"), "hub cannot be reached; go online"),
    "server error": (http_error(errors.HfHubHTTPError, 503), "503 error.*try again"),
    "proxy": (httpx2.ProxyError("no proxy"), "no proxy.*try again"),
    "full disk": (OSError(28, "No space left on device"), "No space left.*try again"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_failed_downloads_say_what_to_do(hub, name):
    hub.answer, message = ANSWERS[name]
    with pytest.raises(CheckpointError, match=message) as error:
        convert.load("org/model", revision="v2")
    assert str(error.value).startswith("org/model at revision v2 ")
    assert error.value.__cause__ is hub.answer


@pytest.fixture
def offline_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models--org--model"


def test_offline_client_with_empty_cache_is_an_error(offline_cache):
    with pytest.raises(CheckpointError, match="hub cannot be reached; unset HF_HUB_OFFLINE or pass"):
        convert.load("org/model")


def test_offline_client_uses_cached_model(offline_cache):
    make(offline_cache / "snapshots" / COMMIT)
    (offline_cache / "refs").mkdir()
    (offline_cache / "refs" / "main").write_text(COMMIT)
    assert convert.load("org/model").directory.name == COMMIT


def test_snapshot_without_weights_is_rejected(hub, tmp_path):
    """A repository that has only pickles is downloaded as a directory of JSON files, which is rejected."""
    hub.answer = make(tmp_path / "snapshot")
    (hub.answer / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        convert.load("org/model")


def test_planning_downloads_only_config(hub, tmp_path):
    hub.answer = tmp_path
    assert resolve_config("org/model") == tmp_path
    patterns = {key: hub.call[key] for key in ("allow_patterns", "ignore_patterns")}
    files = ["config.json", "model.safetensors", "tokenizer.json", "original/config.json", "model.gguf"]
    assert list(filter_repo_objects(files, **patterns)) == ["config.json"]
    hub.call = None
    assert resolve_config(make(tmp_path / "local")) == tmp_path / "local" and hub.call is None
