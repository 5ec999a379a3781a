"""The command line: immediate help, one sentence per mistake, and the same output for every kind of call."""

import importlib
import inspect
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import time

import jax
import pytest
from flax import nnx

import convert
import jspec
from convert import __main__ as module
from convert import dtypes
from jspec import cli
from jspec.cli.common import status_line
from jspec.cli.model_args import Sources
from jspec.decoding.program import decode_program
from jspec.tuning import tune as auto
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
FIELDS = {"prompt", "text", "tokens", "logprobs", "origins", "finish_reason", "num_draft_tokens", "stats", "times"}
PROMPTS = ["the thing", "in a", "Ω ≠ 🙂 then"]


@pytest.fixture
def generate(run, sources):
    """Return ``generate(*arguments)``: the objects of a successful `jspec generate --json` with the tiny pair."""

    def command(*arguments, length=24, **options):
        arguments = "--target", sources[0], *arguments, "-n", length, "--json"
        pair = () if "--plain" in arguments else ("--draft", sources[1])
        code, out, error = run("generate", *arguments, *pair, **options)
        said = error.startswith("auto: measuring") and error.count("\n") == 1 if "auto" in arguments else error == ""
        assert code == 0 and said, error
        return [json.loads(line) for line in out.splitlines()]

    return command


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["tune", "-h"],
        ["plan", "-h"],
        ["convert", "-h"],
        ["--version"],
        [],
        ["generate", "--no"],
    ],
)
def test_help_and_mistakes_import_nothing_slow(arguments):
    code = (
        "import sys, jspec.cli\n"
        "try: jspec.cli.main(sys.argv[1:])\n"
        "finally: print(sorted({'jax', 'flax', 'numpy', 'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == (2 if "--no" in arguments else 0), done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_are_imported_lazily():
    """Public names are imported lazily, from the file that defines them."""
    module = importlib.import_module("jspec.generation.generate")
    assert jspec.generate is module.generate and jspec.speculative_generate is module.speculative_generate
    assert all(getattr(jspec, name) is not None for name in jspec.__all__) and {*jspec.__all__} <= {*dir(jspec)}
    with pytest.raises(AttributeError, match="no attribute 'generator'"):
        _ = jspec.generator


def test_version_and_help(run):
    assert run("--version") == (0, f"jspec {jspec.__version__}\n", "")
    code, out, _ = run("generate", "--help")
    assert code == 0 and not (options := set(re.findall(r"--[a-z-]+", out))) ^ {
        *("--target", "--draft", "--plain", "--temperature", "--top-k", "--top-p", "--min-p", "--seed"),
        *("--max-new-tokens", "--num-draft-tokens", "--json", "--help", "--file", "--chat", "--system", "--stop"),
        *(
            "--accept",
            "--dtype",
            "--quantize",
            "--draft-quantize",
            "--activation-bits",
            "--tree",
            "--show",
            "--template",
            "--tokenizer",
            "--repetition-penalty",
        ),
    }, options
    assert "Put -- before prompts if one begins with a dash" in out
    assert run()[1].startswith("Usage: jspec") and "\n  generate" in run()[1] and "\n  convert" in run()[1]
    assert all(run(command, "-h") == run(command, "--help") for command in ("generate", "tune", "index", "convert"))


def test_bundled_pair_is_default(tmp_path):
    """A process with default settings prints no noise and makes a private cache of compiled programs."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "jspec", "generate", "def main():", "--max-new-tokens", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["stats"]["tokens"] == 6
    cache = tmp_path / "jspec" / "xla"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700 and any(cache.iterdir())


def test_ragged_prompts_give_same_text_as_single_prompts(generate):
    together = generate(*PROMPTS, "--temperature", 0)
    assert [line["prompt"] for line in together] == PROMPTS
    assert [line["text"] for line in together] == [generate(p, "--temperature", 0)[0]["text"] for p in PROMPTS]
    # When sampling, the first request has the same key in any batch.
    assert generate(*PROMPTS, "--seed", 13)[0]["tokens"] == generate(PROMPTS[0], "--seed", 13)[0]["tokens"]


def test_json_fields_are_consistent(generate):
    for line in generate(*PROMPTS, "--seed", 13):  # no output ends before the limit
        stats, origins = line["stats"], line["origins"]
        assert set(line) == FIELDS and line["num_draft_tokens"] == 4
        assert len(line["tokens"]) == len(line["logprobs"]) == len(origins) == stats["tokens"] == 24
        assert line["finish_reason"] == "length" and all(value <= 0 for value in line["logprobs"])
        assert sum(stats["accepted_at"]) == stats["accepted"] == origins.count("accepted") > 0
        assert stats["tokens_per_round"] == 24 / stats["rounds"] > 1
        assert set(line["times"]) == {"import", "load", "compile", "run", "tokens_per_second"}
        assert text_pair.tokenizer().decode(line["tokens"], skip_special_tokens=True) == line["text"]


def test_greedy_text_is_same_with_and_without_draft(generate):
    plain, drafted = (generate(PROMPTS[0], "--temperature", 0, *extra)[0] for extra in (["--plain"], []))
    assert plain["tokens"] == drafted["tokens"] and plain["text"] == drafted["text"]
    assert plain["stats"]["rounds"] == len(plain["tokens"]) > drafted["stats"]["rounds"]
    assert set(plain["origins"]) == {"bonus"} and plain["stats"]["acceptance_rate"] is None


def test_seed_determines_sampled_tokens(generate):
    first, again, other = (generate(PROMPTS[0], "--seed", seed)[0]["tokens"] for seed in (1, 1, 2))
    assert first == again != other


def test_standard_input_is_one_prompt(generate):
    piped = generate(stdin=b"the thing\nin a\n")
    assert len(piped) == 1 and piped[0]["prompt"] == "the thing\nin a\n"
    assert piped[0]["tokens"] == generate("the thing\nin a\n")[0]["tokens"]


def test_every_option_reaches_decoding(monkeypatch, sources):
    """Every option reaches the decoding function, which other tests check."""
    caught = []
    monkeypatch.setattr(cli.generate, "_decode", lambda *arguments: caught.append(arguments) or 1 / 0)
    pair = ["--target", str(sources[0]), "--draft", str(sources[1])]
    options = "--temperature 0.5 --top-k 7 --top-p 0.25 --min-p 0.125 --seed 9 --max-new-tokens 3 --num-draft-tokens 2"
    more = "--repetition-penalty 1.5 --accept block --dtype bfloat16 --quantize int8 --stop end --stop ."
    with pytest.raises(ZeroDivisionError):
        cli.main(["generate", "a", "bc", *pair, *options.split(), *more.split()])
    ((task, models, max_new_tokens, sampling, seed, drafting, _times, _say),) = caught
    assert task.prompts == ["a", "bc"] and task.stop == ("end", ".") and max_new_tokens == 3 and seed == 9
    assert sampling == jspec.SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5)
    assert drafting == {"num_draft_tokens": 2, "accept": "block"}
    for model in models:
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))}
        assert kinds == {"int8", "bfloat16", "float32"}, kinds


def test_draft_is_quantised_separately(monkeypatch, sources):
    """With only `--draft-quantize`, the target stays as it is. For the draft, it takes precedence over `--quantize`."""
    kinds = []
    monkeypatch.setattr(
        cli.generate, "_decode", lambda _, models, *__: kinds.append(tuple(m.quantized for m in models)) or 1 / 0
    )
    command = ["generate", "a", "--target", str(sources[0]), "--draft", str(sources[1])]
    for options in ("--draft-quantize int8", "--quantize int8"):
        with pytest.raises(ZeroDivisionError):
            cli.main([*command, *options.split()])
    assert kinds == [(None, "int8"), ("int8", "int8")]
    assert Sources("target", "model").precision(None, "int8", "int4", "24") == (None, "int8", 24, "int4")


def test_tree_option_drafts_tree(generate):
    """A tree's depth is reported as the number of draft tokens, and the coupled output equals the plain one."""
    drafting, plain = (
        generate(PROMPTS[0], *options)[0] for options in (["--tree", "0,0,1", "--accept", "coupled"], ["--plain"])
    )
    assert drafting["tokens"] == plain["tokens"] and drafting["num_draft_tokens"] == 2
    assert drafting["stats"]["drafted"] > 2 * (drafting["stats"]["rounds"] - 2)  # three draft tokens a round


@pytest.mark.parametrize(
    ("draft", "can"), [("model", True), ("exit:3", True), ("store.safetensors", True), ("lookup", False)]
)
def test_can_branch_depends_on_drafter(draft, can):
    """`can_branch` is true for drafts with which `jspec tune` may recommend a tree."""
    assert Sources("target", draft).can_branch == can and not Sources("target", draft, looks_up=True).can_branch


def test_show_option_draws_rounds(run, sources, generate):
    command = "generate", PROMPTS[0], "--target", sources[0], "--draft", sources[1], "-n", 24
    code, out, _ = run(*command, "--show")
    plain = generate(PROMPTS[0])[0]
    rounds = [line for line in out.splitlines() if " │ " in line]
    assert code == 0 and len(rounds) == plain["stats"]["rounds"] and out.splitlines()[0].endswith("rejected")


def test_different_limit_does_not_recompile(generate, report):
    longer = generate(PROMPTS[0], "--seed", 13, length=57)[0]
    compiled = decode_program._cache_size()
    for length in (1, 24, 96):
        line = generate(PROMPTS[0], "--seed", 13, length=length)[0]
        assert len(line["tokens"]) == length and line["tokens"][:57] == longer["tokens"][:length]
    report(compilations=decode_program._cache_size() - compiled)
    assert decode_program._cache_size() == compiled


def test_auto_uses_tuned_draft_length(generate, monkeypatch):
    tuning = {2: jspec.Tuning(2, 1.5, 1.0, (1.0, 1.0), (1.2, 1.5)), 0: jspec.Tuning(0, 1.0, 1.0, (2.0,), (1.2,))}
    for best, options in ((2, ["--num-draft-tokens", 2]), (0, ["--plain"])):
        monkeypatch.setattr("jspec.tuning.tune_chain._answers", {})
        monkeypatch.setattr(auto, "measure", lambda *_, best=best: tuning[best])
        found, fixed = (generate(PROMPTS[0], *extra) for extra in (["--num-draft-tokens", "auto"], options))
        assert [line["tokens"] for line in found] == [line["tokens"] for line in fixed]
        assert [line["stats"] for line in found] == [line["stats"] for line in fixed]
        assert [line["num_draft_tokens"] for line in found] == [best]


@pytest.mark.parametrize(
    ("best", "said"), [(2, "auto: num_draft_tokens=2 "), (0, "auto: plain decoding is the fastest")]
)
def test_auto_reports_its_choice(run, sources, monkeypatch, best, said):
    monkeypatch.setattr("jspec.tuning.tune_chain._answers", {})
    monkeypatch.setattr(auto, "tune", lambda *_, **__: jspec.Tuning(best, 1.5, 1.0, (1.0,), (1.2,)))
    command = "generate", "the thing", "--target", sources[0], "--draft", sources[1], "--max-new-tokens", 24
    code, _, error = run(*command, "--num-draft-tokens", "auto")
    assert code == 0 and error.splitlines()[-1].startswith(said)
    assert re.match(r"auto: measuring .*`jspec tune` once and pass its number", error)  # before anything slow starts
    assert "auto" not in run(*command)[2]


def test_tune_command_prints_recommendation(run, sources):
    command = "tune", *sources, "--prompt", "in a", "-n", 24, "--max-draft-tokens", 1, "--max-nodes", 2
    code, out, error = run(*command, "--batch", 2, "--temperature", 0, "--json")
    assert (code, error) == (0, "")
    found = json.loads(out)
    assert {name: found.pop(name) for name in ("batch", "temperature")} == {"batch": 2, "temperature": 0}
    assert isinstance(found.pop("device"), str)
    assert set(found) == set(jspec.Tuning.__dataclass_fields__) and found["num_draft_tokens"] in (0, 1)
    assert len(found["round_seconds"]) == 1 and 1 <= found["expected_tokens"][0] <= 2
    code, out, error = run(*command, "--prompt", "the")  # one --prompt per row
    assert (code, error) == (0, "") and "batch 2, temperature 1.0" in out and out.count("<- best") == 1
    assert re.fullmatch(
        r"use num_draft_tokens=1 \(\S+x plain\)|use jspec.Tree\(.*x\)|do not speculate: .*", out.splitlines()[-1]
    )


def test_convert_command_matches_module(run, sources, tmp_path):
    command = "convert", sources[0], tmp_path / "out\udcff", "--to", "hf"  # an undecodable name works
    code, out, error = run(*command)
    assert (code, error) == (0, "") and re.search(r"/out\\udcff: \d+ arrays, float32", out)
    assert convert.load(command[2]).config == convert.load(sources[0]).config
    code, out, error = run(*command)
    assert (code, out) == (1, "") and error.startswith("jspec: ") and "is not overwritten" in error
    assert inspect.signature(module.main) == inspect.signature(module.convert)
    assert [*module.Dtype] == [*dtypes.BY_NAME]


def test_eos_comes_from_model_config(generate, sources, tmp_path):
    """A model whose config names another EOS token stops there, with the same output before it."""
    whole = generate(PROMPTS[0], "--temperature", 0, "--plain")[0]["tokens"]
    end = whole[4]
    shutil.copytree(sources[0], tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(json.dumps(text_pair.RAW | {"eos_token_id": end}))
    line = generate(PROMPTS[0], "--target", tmp_path / "target", "--temperature", 0, "--plain")[0]
    assert line["tokens"] == whole[: whole.index(end) + 1] and line["finish_reason"] == "eos"


def test_colour_is_used_only_on_terminal(run, sources, monkeypatch):
    command = "generate", "the thing", "--target", sources[0], "--draft", sources[1], "--max-new-tokens", 24
    code, out, error = run(*command)
    assert code == 0 and "\x1b" not in out + error and out.startswith("the thing")
    assert re.search(r"^24 tokens \(length\) in \d+ rounds: \S+ per round, \S+ predicted from \d+% acceptance", error)
    assert re.search(r"^import \S+ s, load \S+ s, compile \S+ s, run \S+ s; \d+ tokens/s in all$", error, re.M)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    _, bright, _ = run(*command)
    legend, text = bright.split("\n\n", 1)
    assert legend.count("\x1b[") > 4 and _printed(re.sub(r"\x1b\[[\d;]*m", "", text)) == _printed(out)


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}])
def test_marks_replace_colours_without_colour_support(run, sources, monkeypatch, variables):
    command = "generate", "the thing", "--target", sources[0], "--draft", sources[1], "-n", 60, "--seed", 1
    without = run(*command)[1]
    for name, value in ({"FORCE_COLOR": "1"} | variables).items():
        monkeypatch.setenv(name, value)
    legend, text = run(*command)[1].split("\n\n", 1)
    assert legend == "prompt► accepted «corrected» °bonus° ¦no draft¦" and "\x1b" not in text
    assert text.startswith("the thing►") and "«" in text and "°" in text
    assert _printed(re.sub("[►«»°¦]", "", text)) == _printed(re.sub("[►«»°¦]", "", without))


def _printed(text):
    """Return the printable characters of `text`, without replacement characters."""
    return [letter for letter in text if letter.isprintable() and letter != "\ufffd"]


def test_status_line_shows_progress_and_disappears(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    log = logging.getLogger("jspec.tuning.tune_chain")
    with status_line() as set_status:
        for tell, what in ((set_status, "Loading"), (log.info, "Measuring")):
            tell(what)
            while what not in (shown := capsys.readouterr().err):
                time.sleep(0.01)
            assert "\n" not in shown
    assert capsys.readouterr().err.endswith("\x1b[2K") and not log.isEnabledFor(logging.INFO)


@pytest.mark.parametrize("terminal", [True, False])
def test_warnings_are_printed_in_full(monkeypatch, capsys, terminal):
    """Warnings are printed in full, without line breaks, in the words of the log."""
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with status_line():
        logging.getLogger("jspec.convert").info("a note")
        logging.getLogger("jspec.convert").warning("%s: [mscale] is ignored", "x" * 200)
    assert f"warning: {'x' * 200}: [mscale] is ignored\n" in capsys.readouterr().err
