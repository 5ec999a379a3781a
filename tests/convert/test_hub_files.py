"""GGUF files named as `org/repo:file.gguf`, tested without a network: the hub client is replaced or offline."""

from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors
from typer.testing import CliRunner

import convert
import jspec
from convert import CheckpointError, hub_files
from convert.__main__ import main
from convert.source import resolve_config
from jspec import text
from support import gguf_files
from support.checkpoints import make

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILE = "org/Model-GGUF:model-q4_k_m.gguf"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Replace the client with a repo that has the files `hub.files`; `hub.asked` lists the requested files."""

    class Hub:
        files: tuple[str, ...] = ("README.md", "model-q8_0.gguf", "model-q4_k_m.gguf")
        error: Exception | None = None
        layers = 4
        snapshot = tmp_path / "snapshot"

        def __init__(self):
            self.asked = []

        def file(self, repo_id, name, revision=None):
            self.asked.append((repo_id, name, revision))
            if self.error or name not in self.files:
                raise self.error or http_error(errors.RemoteEntryNotFoundError, 404)
            return str(gguf_files.model(tmp_path / name, num_hidden_layers=self.layers)[0])

        def all(self, repo_id, revision, **patterns):
            return str(self.snapshot)

    replacement = Hub()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", replacement.file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", replacement.all)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo_id, revision: list(replacement.files))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # even if the tests run offline
    return replacement


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Set the client to offline mode, and return the snapshot of a cached repo with `model-q4_k_m.gguf`."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "cache" / "models--org--Model-GGUF"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    gguf_files.model(snapshot / "model-q4_k_m.gguf", {"general.file_type": 15})
    return snapshot


def http_error(kind, status):
    request = httpx2.Request("GET", "https://huggingface.co/org/Model-GGUF")
    return kind(f"{status} error", response=httpx2.Response(status, request=request))


def message(call, *arguments, **options):
    """Return the one-line message of the CheckpointError that a call raises."""
    with pytest.raises(CheckpointError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_only_the_named_file_is_downloaded(hub):
    assert convert.resolve(FILE, "v2").name == "model-q4_k_m.gguf"
    assert hub.asked == [("org/Model-GGUF", "model-q4_k_m.gguf", "v2")]


def test_every_reader_accepts_a_file_in_a_repo(hub, tmp_path):
    assert jspec.load(FILE).config == resolve_and_read(FILE)
    assert text.load_tokenizer(FILE).get_vocab() == text.load_tokenizer(convert.resolve(FILE)).get_vocab()
    assert jspec.plan(FILE, FILE, device="l4").draft
    result = CliRunner().invoke(app(), [FILE, str(tmp_path / "store")])
    assert result.exit_code == 0 and convert.load(tmp_path / "store").config == resolve_and_read(FILE)
    assert set(hub.asked) == {("org/Model-GGUF", "model-q4_k_m.gguf", None)}


def app():
    import typer

    application = typer.Typer()
    application.command()(main)
    return application


def resolve_and_read(source):
    return convert.read_config(convert.resolve(source))


def test_commands_accept_files_as_target_draft_and_tokenizer(hub, run, quick_compile):
    options = "-n", 2, "--temperature", 0
    hub.layers = 1
    plain, drafted = (
        run("generate", "in a", "--target", FILE, *more, *options)[:2]
        for more in (["--plain", "--tokenizer", FILE], ["--draft", f"lookup+{FILE}"])
    )
    assert plain == drafted and plain[0] == 0


def test_local_file_with_a_colon_takes_precedence(hub, tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    gguf_files.model(tmp_path / FILE)
    monkeypatch.chdir(tmp_path)
    assert convert.resolve(FILE) == Path(FILE) and not hub.asked


MISSPELT = {
    "quantisation alone": "org/Model-GGUF:Q4_K_M",
    "nothing": "org/Model-GGUF:",
    "another format": "org/Model-GGUF:model.safetensors",
    "parent": "org/Model-GGUF:../model.gguf",
    "root": "org/Model-GGUF:/model.gguf",
    "backslash": "org/Model-GGUF:folder\\model.gguf",
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_file_is_not_requested(hub, name):
    said = message(convert.resolve, MISSPELT[name])
    assert said == (
        f"{MISSPELT[name]} is neither a local file nor a GGUF file in a Hugging Face repo; write "
        "'org/Model-GGUF:file.gguf' with a file listed on https://huggingface.co/org/Model-GGUF/tree/main."
    )
    assert not hub.asked


@pytest.mark.parametrize(
    "source", [r"C:\models\x.gguf", "C:/models/x.gguf", "a/b/c:x.gguf", "./a/b:x.gguf", "model:x.gguf", Path(FILE)]
)
def test_path_with_a_colon_is_not_requested(hub, source):
    said = message(convert.resolve, source)
    assert said.startswith(f"{source} is neither a directory nor a file here") and "'org/repo:file.gguf'" in said
    assert not hub.asked


def test_part_of_a_file_is_rejected_before_its_download(hub):
    said = message(jspec.load, "org/Model-GGUF:big/model-00002-of-00003.gguf")
    assert (
        "is one of 3 parts; download all parts with `hf download org/Model-GGUF --include 'big/model-*.gguf'`" in said
    )
    assert not hub.asked
    assert str(hub_files.parse("org/x:model-00001-of-00001.gguf")) == "org/x:model-00001-of-00001.gguf"


def test_missing_file_error_lists_the_others(hub):
    said = message(convert.load, "org/Model-GGUF:model-q4.gguf")
    assert said == (
        "org/Model-GGUF has no file model-q4.gguf, but has the GGUF files model-q4_k_m.gguf, model-q8_0.gguf; name one "
        "of them, as in 'org/Model-GGUF:model-q4_k_m.gguf'."
    )
    hub.files = ("config.json",)
    said = message(convert.load, "org/x:a.gguf", revision="v2")
    assert said == "org/x at revision v2 has no file a.gguf, and no other GGUF file; choose another repo."


def test_missing_file_error_claims_nothing_without_the_list(hub, monkeypatch):
    """The hub may refuse to list a repo, because of its rate limit, although it has said that a file is missing."""

    def refuse(repo_id, revision):
        raise http_error(errors.HfHubHTTPError, 429)

    monkeypatch.setattr(huggingface_hub, "list_repo_files", refuse)
    said = message(convert.load, "org/x:a.gguf", revision="v2")
    assert said == (
        "org/x at revision v2 has no file a.gguf; check its name on https://huggingface.co/org/x/tree/main."
    )


@pytest.mark.parametrize("call", [convert.resolve, convert.load, resolve_config, text.load_tokenizer])
def test_repo_of_gguf_files_needs_a_file_name(hub, call):
    said = message(call, "org/Model-GGUF")
    assert "but has the GGUF files model-q4_k_m.gguf, model-q8_0.gguf; name one of them, as in 'org/Model-GGUF:" in said
    hub.files = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert "but has GGUF files in parts (m-00001-of-00002.gguf, m-0" in message(call, "org/Model-GGUF")


def test_repo_of_gguf_files_may_provide_config_or_tokenizer(hub):
    make(hub.snapshot)
    (hub.snapshot / "model.safetensors").unlink()
    assert resolve_config("org/Model-GGUF") == hub.snapshot
    assert "has no *.safetensors file, but has the GGUF files" in message(convert.load, "org/Model-GGUF")
    (hub.snapshot / "tokenizer.json").write_text("{}")
    assert convert.resolve("org/Model-GGUF") == hub.snapshot


FAILURES = {
    "unknown": (http_error(errors.RepositoryNotFoundError, 404), "is neither a file nor in a model repo on the hub; "),
    "gated": (http_error(errors.GatedRepoError, 403), "is gated; accept the licence"),
    "not cached": (errors.LocalEntryNotFoundError("x"), "the hub cannot be reached; go online or pass a file"),
    "full disk": (OSError(28, "No space left on device"), "No space left.*try again"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failed_download_says_what_to_do(hub, name):
    hub.error, expected = FAILURES[name]
    with pytest.raises(CheckpointError, match=expected) as error:
        convert.load(FILE, revision="v2")
    assert str(error.value).startswith(f"{FILE} at revision v2 ") and error.value.__cause__ is hub.error


def test_offline_client_uses_cached_file(cache):
    assert convert.resolve(FILE) == cache / "model-q4_k_m.gguf"
    assert "cannot be reached; unset HF_HUB_OFFLINE or pass a file" in message(convert.resolve, "org/Model-GGUF:x.gguf")
    assert "name one of them, as in 'org/Model-GGUF:model-q4_k_m.gguf'" in message(convert.load, "org/Model-GGUF")


def test_cached_files_are_listed(cache, tmp_path, run):
    """Only whole GGUF files of the main branch are listed, including damaged ones and those in folders."""
    assert list(hub_files.cached()) == [hub_files.HubFile("org/Model-GGUF", "model-q4_k_m.gguf")]
    (cache / "model-00001-of-00002.gguf").write_bytes(b"GGUF")
    (cache / "deep").mkdir()
    (cache / "deep" / "bad.gguf").write_bytes(b"GGUF")
    gguf_files.model(cache / "unnamed.gguf")
    old = cache.parent / COMMIT[::-1]
    old.mkdir()
    gguf_files.model(old / "old.gguf")
    files = {"deep/bad.gguf": "damaged", "model-q4_k_m.gguf": "Q4_K_M", "unnamed.gguf": "unnamed"}
    code, out, _ = run("models")
    listed = out.split("GGUF files in the Hugging Face cache:\n")[1].splitlines()
    assert code == 0 and listed == [f"{kind:8} org/Model-GGUF:{name}" for name, kind in files.items()]
    assert f'"name": "{FILE}", "quantisation": "Q4_K_M", "path": "{cache}' in run("models", "--json")[1]
    (cache.parent.parent / "refs" / "main").unlink()
    assert hub_files.cached() == {} and "GGUF files" not in run("models")[1]
