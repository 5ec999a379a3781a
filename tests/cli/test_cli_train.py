"""`jspec train` on the command line: it writes a drafter that `jspec generate` accepts."""

import dataclasses
import inspect
import json

import jax
import numpy as np
import pytest
from flax import nnx

import convert
import jspec
from convert.heads.files import kind_of
from jspec.cli.train import how_saved, train
from jspec.training.kinds import KINDS
from jspec.training.train import Recipe
from support import blocks, eagle_heads
from support.few import by_default
from support.trainings import chats

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("kind", by_default((*KINDS, "several"), ("eagle", "block")))
def test_trained_drafter_is_saved_and_used(run, sources, tmp_path, kind):
    folder, data = tmp_path / "run", chats(tmp_path / "chats.txt")
    options = ["train", sources[0], "--output", folder, "--data", data, "--steps", 4, "--depth", 2]
    options += ["--step-tokens", 512, "--length", 64, "--draft-vocab", 100]
    options += ["--kind", "model", "--boost", 2] if kind == "several" else ["--kind", kind]
    code, out, err = run(*options)
    assert code == 0, err
    assert "step 4: loss " in out and f"Wrote {folder / 'drafter'}" in out.replace("\n", "")
    assert "tokens/round, predicted" in out
    assert kind_of(folder / "drafter") == (None if kind == "model" else kind)
    if kind == "eagle":
        assert json.loads((folder / "drafter" / "config.json").read_text())["draft_vocab_size"] == 100
    asked = ["generate", "the cat", "--target", sources[0], "--max-new-tokens", 12, "--json", "--temperature", 0]
    drafting = ["--draft", folder / "drafter", *([] if kind in ("pass", "several") else ["--num-draft-tokens", 2])]
    drafted, plain = (json.loads(run(*asked, *more)[1]) for more in (drafting, ["--plain"]))
    assert drafted["text"] == plain["text"]
    assert drafted["stats"]["drafted"] or kind == "pass"  # which drafts nothing in the first round
    if kind in ("pass", "several"):
        code, _, err = run(*asked, "--draft", folder / "drafter", "--tree", "0,0")
        assert code == 2 and "drafter cannot" in err
        code, _, err = run("tune", sources[0], folder / "drafter")
        assert code == 2 and "a tree of its own" in err
    code, _, err = run(*asked, "--draft", folder)
    assert code == 2 and f"use its drafter, --draft {folder / 'drafter'}" in err
    if kind == "eagle":  # like a run that was stopped while it measured
        before = (folder / "drafter" / "model.safetensors").stat().st_mtime_ns
        code, out, err = run(*options)
        assert code == 0 and "drafter already exists." in out.replace("\n", "") and "tokens/round, predicted" in out
        assert (folder / "drafter" / "model.safetensors").stat().st_mtime_ns == before
        code, out, err = run(*options, "--seed", 1)
        assert code == 1 and "was started with seed=0, but now it is 1" in err


def test_drafter_folder_without_run_is_rejected(run, sources, tmp_path):
    (tmp_path / "run" / "drafter").mkdir(parents=True)
    code, _, err = run("train", sources[0], "--output", tmp_path / "run")
    assert code == 2 and "already exists, without the run that made it" in err


@pytest.mark.parametrize("generation", [1, 3])
def test_training_continues_published_head(run, sources, tmp_path, generation):
    """A published head keeps the layout of its generation and its own output head, if it has one."""
    target, first, data = jspec.load(sources[0]), tmp_path / "first", chats(tmp_path / "chats.txt")
    details = {} if generation == 1 else {"own_head": True, "draft_vocab_size": 50, "features": (1,)}
    head = jspec.EagleDrafter(eagle_heads.eagle(target, generation, **details))
    head.save(first, format="eagle" if generation == 1 else "sglang")
    options = ["train", sources[0], "--start", first, "--data", data, "--data", data, "--steps", 1, "--depth", 2]
    options += ["--rate", 1e-9, "--length", 64, "--no-measure"]
    code, _, err = run(*options, "--output", tmp_path / "run")
    assert code == 0, err
    again = jspec.EagleDrafter.load(tmp_path / "run" / "drafter", target)
    assert again.head.config == head.head.config and again.head.origin.layout == (
        "eagle" if generation == 1 else "sglang"
    )
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(head), strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)  # saved in bfloat16
    code, _, err = run(*options, "--kind", "medusa", "--output", tmp_path / "other")
    assert code and "start is of type EagleDrafter, but kind is 'medusa'; use kind='eagle'" in err


@pytest.mark.parametrize("format", ["deepspec", "jetspec"])
def test_training_continues_published_block(run, sources, tmp_path, format):
    """A block drafter keeps the layout of its files."""
    target, data = jspec.load(sources[0]), chats(tmp_path / "chats.txt")
    whole = {"own_embedding": True, "own_head": True, "drafts_from_first": True}
    details = {"jetspec": {"causal": True}, "deepspec": whole}[format]
    first = blocks.drafter(target, features=(1,), qk_norm=True, **details).save(tmp_path / "first", format)
    options = ["train", sources[0], "--kind", "block", "--start", first, "--data", data, "--steps", 1, "--depth", 3]
    code, _, err = run(*options, "--rate", 1e-9, "--length", 64, "--no-measure", "--output", tmp_path / "run")
    assert code == 0, err
    before, after = (json.loads((one / "config.json").read_text()) for one in (first, tmp_path / "run" / "drafter"))
    assert after == before


def test_head_keeps_layout_if_layout_can_express_it(sources, tmp_path):
    """`norm_before_residual` in a plain layout is read, but other programs that read this layout do not know it."""
    target = jspec.load(sources[0])
    jspec.EagleDrafter(eagle_heads.eagle(target, features=(1,))).save(tmp_path / "head", format="sglang")
    kept = how_saved(jspec.EagleDrafter.load(tmp_path / "head", target), "")
    file = tmp_path / "head" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_before_residual": True}))
    other = how_saved(jspec.EagleDrafter.load(tmp_path / "head", target), "")
    assert (kept["format"], other["format"]) == ("sglang", "speculators")
    with pytest.raises(convert.CheckpointError, match=r"features is .* layers in ascending order"):
        how_saved(jspec.EagleDrafter(eagle_heads.eagle(target, features=(2, 1))), "")


def test_medusa_heads_draft_from_their_folder(run, sources, tmp_path):
    target = jspec.load(sources[0])
    path = jspec.MedusaDrafter.untrained(target, 2, rngs=nnx.Rngs(0)).save(tmp_path / "heads")
    asked = ["generate", "the cat", "--target", sources[0], "--draft", path, "--max-new-tokens", 8]
    code, out, err = run(*asked, "--json")
    assert code == 0 and json.loads(out)["stats"]["drafted"], err
    code, _, err = run(*asked, "--num-draft-tokens", 3)
    assert code and "has 2 heads" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "owl"], "kind is 'owl'; expected one of eagle, block, medusa"),
        (["--loss", "l2"], "loss is 'l2'"),
        (["--boost", 2], "boost is 2, but kind is 'eagle'"),
        (["--data", "none.txt"], "none.txt"),
        ([], "The target has no chat template"),
    ],
)
def test_mistakes_are_reported_before_output_is_created(run, sources, tmp_path, options, message):
    code, _, err = run("train", sources[0], "--output", tmp_path / "run", "--length", 64, *options)
    assert code in (1, 2) and message in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_train_command_defaults_equal_function_defaults():
    """Defaults are defined twice, because the command line is parsed before jax is imported."""
    asked = inspect.signature(train).parameters
    for field in dataclasses.fields(Recipe):
        assert asked[field.name].default == field.default, field.name
