"""The benchmarks on user-supplied checkpoints and prompts, and a one-sentence error for each mistake."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import jspec
from bench import subject
from bench.__main__ import app
from bench.report import RESULTS
from jspec import text
from jspec.bundled import PAIR
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return the folders of a tiny two-layer target and its draft model."""
    folder = tmp_path_factory.mktemp("pair")
    return text_pair.write(folder / "mine", num_hidden_layers=2), text_pair.write(folder / "its-draft", distance=0.3)


@pytest.fixture
def bench(pair, tmp_path):
    """Return ``bench(command, *options, **own)``: exit code and output. `own` sets --target etc.; None omits one."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the thing\nin a\n", encoding="utf-8")
    given = {"target": pair[0], "draft": pair[1], "prompts": prompts, "output": tmp_path / "new" / "results"}

    def run(command, *options, **own):
        pairs = [(f"--{name}", str(value)) for name, value in (given | own).items() if value is not None]
        done = CliRunner().invoke(app, [command, *options, *(word for option in pairs for word in option)])
        return done.exit_code, done.output

    return run


def test_command_writes_results_to_output_folder(bench, tmp_path):
    before = set(RESULTS.iterdir())
    code, out = bench(
        "acceptance", "--batch", "3", "--num-draft-tokens", "1", "--max-new-tokens", "4", "--temperature", "0"
    )
    assert code == 0, out
    names = {file.name for file in (tmp_path / "new" / "results").iterdir()}
    stem = "acceptance-mine-its-draft-prompts-k1-b3-cpu"
    assert names == {f"{stem}.json", f"{stem}.png"} and set(RESULTS.iterdir()) == before
    report = json.loads((tmp_path / "new" / "results" / f"{stem}.json").read_text())
    assert "3 prompts of 2 to 5 tokens" in report["title"] and [row["prompt"] for row in report["rows"]] == [
        "own prompts"
    ]


def test_bundled_folders_load_as_checkpoints(tmp_path):
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbfdef f(x):\r\nimport os, sys\n\tpass")
    found = subject.find(8, "109m", str(PAIR / "target"), str(PAIR / "draft"), file, None)
    tokenizer = text.load_tokenizer(PAIR / "target")
    tokens, lengths, keys = found.request(4, width=2)
    rows = [tokenizer.decode(row[:length]) for row, length in zip(tokens, lengths, strict=True)]
    assert rows == ["def f(x):", "import os, sys", "\tpass", "def f(x):"]
    assert keys.shape == (4,) and tokens.shape[1] == lengths.max()
    assert (found.name, found.folder) == ("target+draft, p", RESULTS)
    assert found.draft.config.num_hidden_layers == 2 and found.target.config.num_hidden_layers == 6


DRAFTERS = {
    "lookup": jspec.NGramDrafter(),
    "recycling": jspec.TokenRecyclingDrafter(),
    "exit:1": jspec.EarlyExitDrafter(1),
}


@pytest.mark.parametrize("draft", DRAFTERS)
def test_model_free_drafter_is_used_with_any_target(pair, draft):
    bundled, own = (subject.find(8, "bundled", target, draft, None, None) for target in (None, str(pair[0])))
    assert (bundled.name, own.name) == (f"bundled+{draft}", f"mine+{draft}")
    assert bundled.target.config.num_hidden_layers == 6 and bundled.tokenizer is not None
    assert bundled.draft == own.draft == DRAFTERS[draft]


def test_draft_pass_runs_layers_of_drafter(pair):
    """An early exit's step is a pass over the target's layers that it runs; lookup has no step."""
    target, draft = (jspec.load(folder) for folder in pair)
    found = [
        subject.Subject("x", target, one).draft_passes({"a": 1}, 1, 4, 8)
        for one in (draft, jspec.EarlyExitDrafter(2, (0,)), jspec.NGramDrafter())
    ]
    assert [{name: one.layers for name, one in passes.items()} for passes in found] == [{"a": None}, {"a": (1,)}, {}]
    assert found[0]["a"].arguments[0] is draft and found[1]["a"].arguments[0] is target


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is empty; write one prompt per line"),
        (b"a\n\nb", "line 2 is empty"),
        (b"a\n \nb", "line 2 is empty"),
        (b"a\nb\nc\xff", "line 3 is not UTF-8 (byte 1)"),
        (
            b"a\n" + b"x" * 200,
            "line 2 has 200 tokens, but the models have positions for 112 in addition to the new tokens",
        ),
    ],
)
def test_invalid_prompts_are_reported_with_line_number(bench, tmp_path, content, sentence):
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    code, out = bench("trace", "--max-new-tokens", "16", prompts=file)
    assert code == 1 and str(file) in out and sentence in out and out.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "own", "sentence"),
    [
        ("gap", {"draft": None}, "--target and --draft go together"),
        ("gap", {"target": None}, "--target and --draft go together"),
        ("gap", {"target": "no-such-folder"}, "no-such-folder is neither a directory nor a file here"),
        ("gap", {"target": None, "draft": None}, "109m has random weights and no tokenizer"),
        ("rules", {"draft": "lookup"}, "requires a draft model, but lookup is not a model"),
        ("acceptance", {"draft": "exit:1"}, "requires a draft model, but exit:1 is not a model"),
        ("gap", {"draft": "recycling"}, "drafts chains, but recycling drafts a tree"),
        ("gap", {"draft": "none"}, "--target and --draft go together"),
        ("gap", {"draft": "exit:x"}, "exit:x is not an exit"),
        ("gap", {"draft": "exit:9"}, "leaves out none of the target's"),
        ("gap", {"target": None, "draft": "exit:9"}, "109m has random weights and no tokenizer"),
    ],
)
def test_conflicting_options_give_one_sentence(bench, command, own, sentence):
    code, out = bench(command, **own)
    assert code == 1 and sentence in out and out.count("\n") == 1


def test_different_tokenizer_is_rejected(bench, tmp_path):
    other = text_pair.write(tmp_path / "other")
    text_pair.tokenizer(swapped=70).save_pretrained(other)
    code, out = bench("latency", draft=other)
    assert code == 1 and "tokenizer is not the target's: id 70" in out and out.count("\n") == 1


@pytest.mark.parametrize("option", ["prompts", "output"])
def test_path_of_wrong_kind_is_rejected(bench, tmp_path, option):
    wrong = tmp_path if option == "prompts" else tmp_path / "prompts.txt"
    code, out = bench("gap", **{option: wrong})
    assert code == 2 and f"--{option}" in out


def test_random_weights_get_random_prompts(toy):
    tokens, lengths, _ = subject.Subject("x", toy(0), toy(0)).request(3, width=5)
    assert tokens.shape == (3, 5) and len(np.unique(tokens, axis=0)) == 3 and (lengths == 5).all()
