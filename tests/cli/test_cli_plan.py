"""`jspec plan` on the command line, with folders that contain only config.json."""

import json
import re

import pytest

import jspec
from jspec.bundled import PAIR
from support import block_checkpoints, eagle_heads, toys


@pytest.fixture
def folders(tmp_path):
    """Return target and draft folders that contain only the bundled pair's configurations."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        text = (PAIR / name / "config.json").read_text(encoding="utf-8")
        (tmp_path / name / "config.json").write_text(text, encoding="utf-8")
    return tmp_path / "target", tmp_path / "draft"


def write(folder, **changes):
    """Apply changes to the configuration in `folder`."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def large(folders):
    """Give the folders the configurations of Llama-3.2-3B and 1B, and return them."""
    shared = {
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    }
    write(folders[0], hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128, **shared)
    write(folders[1], hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, head_dim=64, **shared)
    return folders


def test_plan_prints_tables_and_recommendation(run, folders):
    code, out, error = run("plan", *large(folders), "--device", "t4")
    assert (code, error) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    found = jspec.plan(*folders, device="t4")
    assert [line.strip() for line in out.splitlines()[:2]] == [
        "Tesla T4, float16: batch 1, length 4096",
        "prompt 2048, assumed acceptance rate 0.8",
    ]
    assert ["plain", "6.43", "0.47", "~0.60", "7.50", "47%"] in lines
    assert ["draft", "8.90", "0.61", "~0.81", "10.31", "65%"] in lines
    assert ["int8", "draft", "7.66", "0.61", "~0.81", "9.07", "57%"] in lines
    seconds = found.draft.round_seconds[1]
    assert ["2", "2.44", f"{seconds * 1e3:.3g}", f"{2.44 / seconds:.0f}", "best", "1.38x", "1.70x"] in lines
    assert [row[0] for row in lines[:-1] if row and row[-1].endswith("x")] == ["plain", *map(str, range(1, 17))]
    assert "predicted, not measured" in out and "a quantised draft is assumed to be accepted as often" in out
    assert out.splitlines()[-1] == (
        "quantise the draft: in int8, with num_draft_tokens=4, it would run at 1.80x the speed of plain decoding, "
        "compared with 1.38x as given"
    )
    assert max(map(len, out.splitlines()[:-1])) <= 80


SENTENCES = {
    "speculate": (["--quantize", "int8"], r"use num_draft_tokens=4 \(1.80x plain, predicted\)"),
    "another number": (
        ["--quantize", "int8", "--num-draft-tokens", 9],
        r"use num_draft_tokens=4 \(1.80x plain, predicted\); num_draft_tokens=9 would run at 1.52x",
    ),
    "do not": (["--acceptance", 0.1], "do not speculate: at best, with num_draft_tokens=1, it would run at 0.79x the"),
    "only in int8": (["--acceptance", 0.3], ".*, but as given it does not pay off"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_last_line_is_recommendation(run, folders, name):
    options, sentence = SENTENCES[name]
    code, out, _ = run("plan", *large(folders), "--device", "t4", *options)
    assert code == 0 and re.fullmatch(sentence if sentence.startswith(".*") else f"{sentence}.*", out.splitlines()[-1])
    assert ("assumed to be accepted" in out) == ("--quantize" not in options)


def test_plan_mentions_memory_left_by_jax(run, folders):
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in run("plan", *large(folders), "--device", "t4")[1]
    assert "JAX takes 75% of a GPU's memory" in run("plan", *folders, "--device", "t4", "--batch", 4)[1]
    assert "JAX takes" not in run("plan", *folders, "--device", "v5e", "--batch", 4)[1]


def test_json_output_equals_plan(run, folders):
    code, out, _ = run(
        "plan", *folders, "--device", "h100", "--batch", 2, "--length", 64, "--acceptance", 0.5, "--json"
    )
    (line,) = map(json.loads, out.splitlines())
    found = jspec.plan(*folders, device="h100", batch=2, length=64, acceptance=0.5)
    assert code == 0 and (line["verdict"], line["plain_seconds"]) == (found.verdict, found.plain_seconds)
    assert line["draft"]["speedups"] == [*found.draft.speedups] and line["advice"] and line["device"]["title"]
    assert (line["batch"], line["length"], line["acceptance"]) == (2, 64, 0.5)


def test_several_devices_share_both_models(run):
    code, out, _ = run("plan", "--device", "h100", "--devices", 2, "--json")
    expected = jspec.plan(PAIR / "target", PAIR / "draft", device="h100", num_devices=2)
    assert code == 0 and json.loads(out)["plain_seconds"] == expected.plain_seconds
    assert "2 x NVIDIA H100" in run("plan", "--device", "h100", "--devices", 2)[1]
    assert "num_devices=5 does not divide the" in run("plan", "--device", "h100", "--devices", 5)[2]


def test_bundled_pair_is_planned_without_models(run):
    code, out, _ = run("plan", "--device", "h100")
    assert code == 0 and "use num_draft_tokens=" in out.splitlines()[-1]


def test_plan_that_does_not_fit_is_an_error(run, folders):
    command = "plan", *large(folders), "--device", "t4", "--batch", 16
    said = (
        r"does not fit: 8\.90 GB of weights, 9\.68 GB of caches and ~12\.88 GB of temporaries exceed the 15\.83 GB "
        r"of one Tesla T4; a batch of 4 or a length of \d+ would fit\n"
    )
    code, out, error = run(*command)
    assert (code, out) == (1, "") and re.fullmatch(f"jspec: {said}", error)
    code, out, error = run(*command, "--json")
    assert code == 1 and json.loads(out)["verdict"] == "does not fit" and re.fullmatch(f"jspec: {said}", error)


MISTAKES = {
    "unknown option": (["--temprature", 1], 2, "(see jspec plan --help)"),
    "unknown device": (["--device", "h1000"], 2, "'h1000' is not one of h200, h100, a100, l4, t4, v5e, v6e"),
    "no device": ([], 1, "Plans do not support the local device, cpu; name one of h200"),
    "no rows": (["--batch", 0], 2, "--batch"),
    "certain twice": (["--acceptance", 1.5], 2, "--acceptance"),
    "no number": (["--device", "t4", "--acceptance", "nan"], 2, "--acceptance"),
    "no drafts": (["--num-draft-tokens", 0], 2, "--num-draft-tokens"),
    "unknown rounding": (["--quantize", "int3"], 2, "'int3' is not one of int8, int4"),
    "too long": (["--device", "t4", "--length", 5000], 1, "length=5000 is more than the 1024 positions that both"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_in_one_sentence(mistake, run, folders):
    options, expected_code, phrase = MISTAKES[mistake]
    write(folders[0], max_position_embeddings=1024)
    code, out, error = run("plan", *folders, *options)
    assert (code, out) == (expected_code, "")
    assert error.startswith("jspec: ") and error.count("\n") == 1 and phrase in error


MODELS = {
    "target alone": (["TARGET"], 2, "TARGET needs DRAFT"),
    "no model": (
        ["TARGET", "lookup"],
        2,
        "DRAFT lookup is not a model, and jspec plan supports only models and block drafters; measure",
    ),
    "behind lookup": (["TARGET", "lookup+a/b"], 2, "DRAFT lookup+a/b is not a model, and jspec plan supports"),
    "no draft": (["TARGET", "none"], 2, "DRAFT none is not a model"),
    "nowhere": (["TARGET", "/no/such/folder"], 1, "/no/such/folder is neither a directory nor"),
    "another vocabulary": (["TARGET", "DRAFT"], 1, "The draft's vocabulary has 99 tokens and the target's"),
}


def test_block_drafter_is_planned_from_its_config(run, folders, tmp_path):
    """The table has a column for the block drafter, and a line names the size of each of its parts."""
    raw = json.loads((folders[0] / "config.json").read_text(encoding="utf-8"))
    sizes = {name: raw[name] for name in ("vocab_size", "hidden_size")}
    block = (
        block_checkpoints.CONFIGS["deepspec dflash"] | sizes | {"target_layer_ids": [0, 1], "num_target_layers": None}
    )
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "config.json").write_text(json.dumps(block), encoding="utf-8")
    code, out, error = run("plan", folders[0], tmp_path / "block", "--device", "t4")
    assert (code, error) == (0, "") and "block drafter" in out and "MB of the block drafter: body " in out
    assert re.findall(r"^ +(\d) +\d\.\d\d ", out, re.M) == ["1", "2", "3", "4"]
    code, _, error = run("plan", folders[0], tmp_path / "block", "--device", "t4", "--quantize", "int8")
    assert code == 1 and "plans for quantised draft models, not block drafters" in error
    code, out, _ = run("plan", folders[0], tmp_path / "block", "--device", "t4", "--json")
    assert code == 0 and json.loads(out)["int8"] is None and json.loads(out)["block"]["Markov head"] == 0


def test_head_cannot_be_planned(run, folders, tmp_path):
    head = jspec.EagleDrafter(eagle_heads.eagle(toys.tiny_llama(0, 2))).save(tmp_path / "head")
    code, _, error = run("plan", folders[0], head)
    assert code == 2 and "is not a model, and jspec plan supports only models" in error


@pytest.mark.parametrize("mistake", MODELS)
def test_unplannable_models_are_rejected(mistake, run, folders):
    models, expected_code, phrase = MODELS[mistake]
    write(folders[1], vocab_size=99)
    names = dict(zip(("TARGET", "DRAFT"), folders, strict=True))
    code, out, error = run("plan", *(names.get(model, model) for model in models), "--device", "t4")
    assert (code, out) == (expected_code, "")
    assert error.startswith("jspec: ") and error.count("\n") == 1 and phrase in error
