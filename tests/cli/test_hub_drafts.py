"""`--draft org/name` with a repo that holds a block drafter. The Hub's client is replaced, so nothing is downloaded."""

import json

import huggingface_hub
import ml_dtypes
import pytest
from huggingface_hub import errors
from safetensors import safe_open

import jspec
from convert import CheckpointError
from jspec.cli.model_args import Precision, Sources, sources
from support import block_checkpoints, text_pair

REPO = "deepseek-ai/dspark_qwen3_8b_block7"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    raw = block_checkpoints.DSPARK_BLOCK7
    sizes = {"hidden_size": raw["hidden_size"], "num_hidden_layers": raw["num_target_layers"]}
    return text_pair.write(tmp_path_factory.mktemp("target") / "target", **sizes)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Put the drafter on the Hub, and return the list of downloaded repos."""
    folder, asked = tmp_path / "snapshot", []
    block_checkpoints.write(folder, block_checkpoints.DSPARK_BLOCK7, dtype=ml_dtypes.bfloat16)

    def download(repo_id, **options):
        asked.append(repo_id)
        if repo_id != REPO:
            raise errors.LocalEntryNotFoundError("offline")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return asked


def test_checkpoint_has_published_tensors(hub, tmp_path):
    """The file has 64 tensors, 11 of them per layer, all in bfloat16."""
    with safe_open(tmp_path / "snapshot" / "model.safetensors", "numpy") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    layers = {name for name in names if name.startswith("layers.")}
    assert len(names) == 64 and len(layers) == 5 * 11
    assert names - layers == {
        *("embed_tokens.weight", "lm_head.weight", "norm.weight", "fc.weight", "hidden_norm.weight"),
        *("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
        *("confidence_head.proj.weight", "confidence_head.proj.bias"),
    }


def test_python_loads_repo_id(hub, target, tmp_path):
    drafter = jspec.BlockDrafter.load(REPO, jspec.load(target))
    assert hub == [REPO] and drafter.max_chain_length == 7 and drafter.features == (1, 2, 3, 4, 5)
    written = json.loads((drafter.save(tmp_path / "saved", "deepspec") / "config.json").read_text())
    assert written == block_checkpoints.DSPARK_BLOCK7


@pytest.mark.parametrize("draft", [REPO, f"lookup+{REPO}"])
def test_generate_drafts_with_repo_id(hub, target, run, draft):
    options = ["generate", "the in a", "--target", target, "--temperature", 0, "--max-new-tokens", 9]
    code, plain, _ = run(*options, "--plain", "--json")
    assert code == 0 and not hub
    code, out, error = run(*options, "--draft", draft, "--num-draft-tokens", 7, "--json")
    assert code == 0, error
    assert set(hub) == {REPO} and json.loads(out)["text"] == json.loads(plain)["text"]


def test_serve_takes_repo_id(hub, target, monkeypatch, run):
    """Nothing is downloaded before the target has been found."""
    from jspec.cli import serve

    monkeypatch.setattr(serve, "_run", lambda engine, *others, **options: loaded.append(engine))
    loaded = []
    options = ["serve", target, "--draft", REPO, "--port", 0, "--slots", 1, "--max-length", 32]
    code, _, error = run(*options, "--num-draft-tokens", 2)
    assert code == 0, error
    assert len(loaded) == 1 and set(hub) == {REPO}
    hub.clear()
    code, _, error = run("serve", "no/target", "--draft", REPO, "--port", 0)
    assert code == 1 and "no/target" in error and REPO not in hub


def test_draft_quantize_applies_to_blocks(hub, target, run):
    options = ["generate", "the in a", "--target", target, "--temperature", 0, "--max-new-tokens", 9, "--json"]
    code, plain, _ = run(*options, "--plain")
    assert code == 0
    for kind in ("int8", "none"):
        code, out, error = run(*options, "--draft", REPO, "--draft-quantize", kind)
        assert code == 0, error
        assert json.loads(out)["text"] == json.loads(plain)["text"]
        _, drafter = sources(str(target), REPO).load(Precision(draft_quantize=kind))
        assert drafter.block.quantized == {"int8": "int8", "none": None}[kind]


def test_offline_hub_is_named(hub, target, run):
    with pytest.raises(CheckpointError, match="org/other"):
        jspec.BlockDrafter.load("org/other")
    code, _, error = run("generate", "x", "--target", target, "--draft", "org/other")
    assert code == 1 and "org/other" in error and error.count("\n") == 1


def test_local_folder_takes_precedence(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block_checkpoints.write(tmp_path / REPO, block_checkpoints.DSPARK_BLOCK7)
    assert Sources("x", REPO).head_kind == "block" and not hub
    assert sources("x", "lookup").head_kind is None
