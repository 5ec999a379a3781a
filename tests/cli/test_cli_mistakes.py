"""Mistakes on the command line end in one sentence, before anything slow if possible."""

import shutil

import pytest

from jspec import cli
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")

MISTAKES = {
    "unknown option": (["x", "--temprature", 1], 2, "No such option: --temprature"),
    "not a number": (["x", "--seed", "one"], 2, "--seed"),
    "below its range": (["x", "--temperature", -1], 2, "--temperature"),
    "above its range": (["x", "--top-p", 1.5], 2, "--top-p"),
    "no new tokens": (["x", "--max-new-tokens", 0], 2, "--max-new-tokens"),
    "no prompt": ([], 2, "There is no prompt; pass a prompt"),
    "not UTF-8": (["x", "a\udcff"], 2, "PROMPT 2 is not UTF-8 text (character 2)"),
    "length of no draft": (["x", "--plain", "--num-draft-tokens", 4], 2, "leave out --num-draft-tokens"),
    "rule of no draft": (["x", "--draft", "none", "--accept", "block"], 2, "leave out --accept"),
    "unknown rule": (["x", "--accept", "lossy"], 2, "'lossy' is not one of rejection, block, coupled"),
    "unknown dtype": (["x", "--dtype", "int4"], 2, "'int4' is not one of float32"),
    "unknown rounding": (["x", "--quantize", "int3"], 2, "'int3' is not one of int8, int4"),
    "quantised lookup": (
        ["x", "--draft", "lookup", "--draft-quantize", "int4"],
        2,
        "or a block drafter, but lookup is none of these; leave out",
    ),
    "quantised exit": (
        ["x", "--draft", "exit:3", "--draft-quantize", "int4"],
        2,
        "or a block drafter, but exit:3 is none of these",
    ),
    "no exit": (["x", "--draft", "exit:0"], 2, "exit:0 is not an exit; write exit:N"),
    "no exit to be found": (
        ["x", "--target", "TARGET", "--draft", "exit"],
        2,
        "--draft exit works only with jspec tune",
    ),
    "no layer to skip": (["x", "--draft", "exit:4-"], 2, "exit:4- is not an exit; write exit:N for"),
    "a layer behind the exit": (["x", "--draft", "exit:4-1-4"], 2, "at most once, skip only layers 0 to 3"),
    "a layer twice": (["x", "--draft", "exit:4-2-2"], 2, "exit:4-2-2 must skip each layer at most once"),
    "no layer left": (["x", "--draft", "exit:2-0-1"], 2, "and keep at least one."),
    "exit of all layers": (["x", "--target", "TARGET", "--draft", "exit:1"], 2, "none of the target's 1 layers;"),
    "empty stop": (["x", "--stop", "a", "--stop", ""], 2, "--stop 2 is empty"),
    "stop of no text": (["x", "--stop", "\udcff"], 2, "--stop is not UTF-8 text (character 1)"),
    "far too long": (["x", "-n", 10**20], 2, "--max-new-tokens"),
    "system of no chat": (["x", "--system", "a"], 2, "add --chat"),
    "chat without a template": (["x", "--chat"], 2, "The prompt is a conversation, but the tokenizer has no chat"),
    "no file": (["--file", "NOTHING/none.jsonl"], 2, "none.jsonl"),
    "file and prompt": (["x", "--file", "PROMPTS"], 2, "leave out one of the two"),
    "draft alone": (["x", "--draft", "DRAFT"], 2, "is a model, which needs a target; name its target"),
    "no such draft": (["x", "--draft", "loookup"], 2, "lists, did you mean 'lookup'; Hugging Face repo ids have"),
    "tokenizer alone": (["x", "--tokenizer", "TARGET"], 2, "--tokenizer needs a target, because the bundled"),
    "draft, and none": (["x", "--plain", "--target", "TARGET", "--draft", "DRAFT"], 2, "leave out --draft"),
    "no such model": (["x", "--target", "/no/such/folder", "--plain"], 1, "/no/such/folder is neither a directory nor"),
    "a name of the hub's first days": (["x", "--target", "gpt2", "--plain"], 1, "repo ids have the form 'org/repo'"),
    "no checkpoint": (["x", "--target", "NOTHING", "--plain"], 1, "NOTHING holds no *.safetensors file"),
    "no such datastore": (["x", "--draft", "no.safetensors"], 1, "no.safetensors does not exist; build a datastore"),
    "empty prompt": (["x", "", "--target", "TARGET", "--plain"], 2, "Prompt 2 is empty"),
    "empty prompts": (["", "x"], 2, "PROMPT 1 is empty; add some text. (see jspec"),
    "too long": (["x", "--target", "TARGET", "--plain", "--max-new-tokens", 500], 1, "501 positions"),
    "tree of no draft": (["x", "--plain", "--tree", "0,0"], 2, "leave out --tree"),
    "rounds of no draft": (["x", "--plain", "--show"], 2, "leave out --show"),
    "for people or machines": (["x", "--show", "--json"], 2, "leave out one of the two"),
    "two shapes": (["x", "--tree", "0,0", "--num-draft-tokens", 2], 2, "leave out --num-draft-tokens"),
    "cannot branch": (["x", "--target", "x", "--tree", "0,0"], 2, "a head, a datastore or exit:N; lookup cannot"),
    **{
        f"{draft or 'nothing'} behind lookup": (
            ["x", "--target", "x", "--draft", f"lookup+{draft}"],
            2,
            f"a datastore or exit:N; {draft or 'nothing'} does not.",
        )
        for draft in ("", "none", "lookup", "exit")
    },
    "a tree behind lookup": (["x", "--target", "x", "--draft", "lookup+o/y", "--tree", "0,0"], 2, "lookup+o/y cannot"),
    "a model behind lookup": (["x", "--draft", "lookup+o/y"], 2, "The draft 'o/y' is a model, which needs a target"),
    "no tree": (["x", "--tree", "0,2"], 2, "'0,2' is not a tree; list the parent of each node"),
    "no numbers": (["x", "--tree", "0, 1"], 2, "'0, 1' is not a tree"),
    "no length": (["x", "--num-draft-tokens", 0], 2, "'0' is neither a whole number of at least 1 nor auto"),
    "nor a word": (["x", "--num-draft-tokens", "best"], 2, "'best' is neither"),
    "nothing kept": (["x", "--top-p", 0], 2, "--top-p must be above 0"),
    "no weights": (["x", "--target", "EMPTY", "--plain"], 1, "safetensors"),
    "another tokenizer": (["x", "--target", "TARGET", "--draft", "SWAPPED"], 1, "id 40 is"),
}


TUNE_MISTAKES = {
    "unknown option": (["--temprature", 1], 2, "(see jspec tune --help)"),
    "no drafts": (["--max-draft-tokens", 0], 2, "--max-draft-tokens"),
    "no rows": (["--batch", 0], 2, "--batch"),
    "target alone": (["TARGET"], 2, "TARGET needs DRAFT"),
    "no draft": (["TARGET", "none"], 2, "TARGET needs DRAFT"),
    "too many models": (["TARGET", "DRAFT", "more"], 2, "more"),
    "no such model": (["/no/such/folder", "DRAFT"], 1, "/no/such/folder is neither a directory nor"),
    "nothing to leave out": (["TARGET", "exit"], 1, "target has only one layer, so none can be skipped"),
    "empty prompt": (["TARGET", "DRAFT", "--prompt", ""], 2, "The prompt is empty"),
    "not UTF-8": (["TARGET", "DRAFT", "--prompt", "\udcff"], 2, "--prompt is not UTF-8 text (character 1)"),
    "too short": (["TARGET", "DRAFT", "--max-new-tokens", 8], 1, "too small to measure"),
    "too long": (["TARGET", "DRAFT", "--max-new-tokens", 500], 1, "positions"),
}


@pytest.mark.parametrize("mistake", TUNE_MISTAKES)
def test_tune_mistakes_end_in_one_sentence(mistake, run, sources):
    arguments, expected_code, phrase = TUNE_MISTAKES[mistake]
    folders = dict(zip(("TARGET", "DRAFT"), sources, strict=True))
    code, out, error = run("tune", *(folders.get(argument, argument) for argument in arguments))
    assert (code, out) == (expected_code, "")
    assert error.startswith("jspec: ") and error.count("\n") == 1 and phrase in error


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_end_in_one_sentence(mistake, run, sources, tmp_path):
    arguments, expected_code, phrase = MISTAKES[mistake]
    folders = dict(zip(("TARGET", "DRAFT"), sources, strict=True)) | {
        name: tmp_path / name for name in ("EMPTY", "SWAPPED", "NOTHING")
    }
    folders["NOTHING"].mkdir()
    (folders["NOTHING"] / "notes.txt").touch()
    folders["PROMPTS"] = folders["NOTHING"] / "notes.txt"
    for folder in (folders["EMPTY"], folders["SWAPPED"]):
        shutil.copytree(sources[1], folder)
    (folders["EMPTY"] / "model.safetensors").unlink()
    text_pair.tokenizer(swapped=40).save_pretrained(folders["SWAPPED"])
    code, out, error = run("generate", *(folders.get(argument, argument) for argument in arguments))
    assert (code, out) == (expected_code, "")
    assert error.startswith("jspec: ") and error.count("\n") == 1 and phrase in error


@pytest.mark.parametrize(
    ("stdin", "said"), [(b"", "Standard input is empty"), (b"a\xff", "Standard input is not UTF-8 text (byte 2)")]
)
def test_invalid_standard_input_is_rejected(run, monkeypatch, stdin, said):
    monkeypatch.setattr(cli.generate, "status_line", lambda: pytest.fail("it went on"))
    code, out, error = run("generate", stdin=stdin)
    assert (code, out) == (2, "") and error.startswith(f"jspec: {said}") and error.count("\n") == 1


def test_prompts_are_validated_before_loading_models(run, sources, monkeypatch):
    monkeypatch.setattr(cli.model_args.Sources, "load", lambda *_: pytest.fail("models were loaded"))
    assert "The prompt is empty" in run("generate", "", "--target", sources[0], "--draft", sources[1])[2]


def test_empty_prompt_does_not_load_bundled_pair(run, monkeypatch):
    monkeypatch.setattr(cli.generate, "status_line", lambda: pytest.fail("it went on"))
    code, out, error = run("generate", "")
    assert (code, out) == (2, "") and error.startswith("jspec: PROMPT is empty; add")


def test_bugs_keep_their_traceback(run, monkeypatch):
    monkeypatch.setattr(cli.generate, "sources", lambda *arguments: {}["gone"])
    with pytest.raises(KeyError, match="gone"):
        cli.main(["generate", "x"])


def test_too_long_request_is_rejected_before_compiling(run, sources, monkeypatch):
    monkeypatch.setattr("jspec.generation.complete.Task.decode", lambda *_, **__: pytest.fail("it went on"))
    target, draft = sources
    for drafting in (["--plain"], ["--draft", draft], ["--draft", "lookup"]):
        code, out, error = run("generate", "x", "--target", target, *drafting, "--max-new-tokens", 500)
        assert (code, out) == (1, "") and "501 positions" in error, error
