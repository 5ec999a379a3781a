"""The benchmark of a target and its draft model on coding questions, with a tiny pair instead of Qwen2.5-Coder."""

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import jspec
from bench import chats, coder, llamacpp, timing
from bench.__main__ import app
from pair.corpus import Document
from support import text_pair
from support.templates import TEMPLATE

pytestmark = pytest.mark.usefixtures("quick_compile")
GREEDY = "plain", "draft model, K = 1", "lookup", "lookup, else draft model"


@pytest.fixture
def short(monkeypatch):
    """Use short questions of two kinds."""
    monkeypatch.setattr(chats, "CODE_KINDS", ("bugs", "tests"))
    monkeypatch.setattr(chats, "questions", lambda kind: [f"the {kind}", "in a"])


@pytest.fixture
def pair(tmp_path):
    """Return the options that name a tiny target with a chat template, and its draft."""
    target = text_pair.write(tmp_path / "target", max_position_embeddings=512)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    return "--target", target, "--draft", text_pair.write(tmp_path / "draft", distance=0.3)


def answers(*options):
    done = CliRunner().invoke(app, ["answers", *map(str, options)])
    return done.exit_code, " ".join(done.output.split())


def report(folder, *options):
    """Run the command, and return its notes and its rows by question kind, batch size and program."""
    code, out = answers("--pair", "qwen-coder", "--output", folder, *options)
    assert code == 0, out
    (file,) = folder.glob("answers-qwen-coder-t*-cpu.json")
    found = json.loads(file.read_text())
    return found["notes"], {(row["question"], row["batch"], row["program"]): row for row in found["rows"]}


def test_coding_questions_are_distinct_and_sixteen_per_kind():
    found = [question for kind in chats.CODE_KINDS for question in chats.questions(kind)]
    assert len(found) == 64 == len({*found}) and not {*found} & {*chats.questions("code")}


def test_every_way_is_measured_by_kind_and_batch(pair, short, tmp_path):
    twins = ("--transformers",) if importlib.util.find_spec("torch") else ()
    options = *pair, "--questions", 2, "--batch", 1, "--batch", 2, "--num-draft-tokens", 1, "--max-new-tokens", 8
    smaller = "--draft-vocabulary", 40, "--draft-quantize", "int8"
    notes, rows = report(tmp_path, *options, *twins, "--tune", *smaller)
    names = {
        *GREEDY,
        "draft model, int8, 40 tokens, K = 1",
        *(("transformers plain", "transformers assisted") if twins else ()),
    }
    assert {name for kind, batch, name in rows if (kind, batch) == ("all", 1)} == names
    assert {(kind, batch) for kind, batch, _ in rows} == {("all", 1), ("bugs", 1), ("tests", 1), ("all", 2)}
    for (kind, batch, name), row in rows.items():
        asked = 2 if kind == "all" else batch
        assert row["same texts"] == f"{asked} of {asked}" and row["plain: from"] <= row["x plain"] <= row["plain: to"]
        assert (row["tokens per round"] == "") == (name == "plain" or "transformers" in name)
    assert rows["bugs", 1, "plain"]["x plain"] == 1 and "llama.cpp is not measured" in notes[1]
    assert notes[2].startswith("Batch 1: tune chose ") and notes[3].startswith("Batch 2: tune chose ")


def test_llama_cpp_and_its_lookup_decode_the_same_file(pair, tmp_path):
    pytest.importorskip("llama_cpp")
    target, prompt, file = jspec.load(pair[1]), np.tile(np.arange(9, 17), 3), tmp_path / "x.gguf"
    llamacpp.write_gguf(target, file)
    run = coder.Run(1, (1,), (1,), 12, 0.0, False, False)
    others = coder._others(coder.Subject("x", target, None), file, len(prompt), run)
    texts = {name: call() for name, call in coder._other_calls(others, [prompt], run, ()).items()}
    request = prompt[None], np.array([len(prompt)]), jax.random.split(jax.random.key(0), 1)
    plain = jspec.generate(target, *request, max_new_tokens=12, sampling=jspec.SamplingParams(temperature=0))
    assert texts == dict.fromkeys(("llama.cpp", "llama.cpp lookup"), plain.tokens.tolist())
    assert others["llama.cpp lookup"].draft_model.num_pred_tokens == coder.LOOKUP
    sampled = coder._other_calls(others, [prompt], dataclasses.replace(run, temperature=1.0), ())
    assert all(len(call()[0]) == 12 for call in sampled.values())
    assert coder._other_calls(others, [prompt] * 2, run, ()) == {}


def test_all_programs_answer_a_question_before_the_next(monkeypatch):
    """The first question of each width is also answered once before timing."""
    order = []
    monkeypatch.setattr(chats, "ends", lambda subject: ())

    def decoder(subject, drafter, k, requests, *options):
        return lambda: order.append((drafter, requests[0][1].tolist())) or [[1]]

    monkeypatch.setattr(chats, "decoder", decoder)
    groups = [(("bugs",), [np.arange(1, 1 + n)]) for n in (5, 6)]
    subject = coder.Subject("x", None, None, text_pair.tokenizer())
    run = coder.Run(2, (1,), (1,), 4, 0.0, False, False)
    readings = coder._readings(subject, {}, groups, {"a": ("A", 1), "b": ("B", 1)}, run)
    assert order == [("A", [5]), ("B", [5])] * 2 + [("A", [6]), ("B", [6])]
    assert [list(times) for _, times in readings] == [["a", "b"]] * 2


def test_questions_alternate_between_kinds(short):
    tokenizer = text_pair.tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert [kind for kind, _ in coder.coding_questions(tokenizer, 3)] == ["bugs", "tests", "bugs"]


def test_mean_ratio_is_geometric_with_interval_over_readings():
    found = timing.mean_ratio(np.array([1.0, 4.0]), np.array([1.0, 1.0]))
    assert (found.low, found.median, found.high, found.count) == pytest.approx((1, 2, 4, 2))
    many = timing.mean_ratio(np.exp(np.random.default_rng(0).normal(size=400)), np.ones(400))
    assert many.high / many.low == pytest.approx(np.exp(2 * 1.96 / 20), rel=0.1)


def test_pair_is_found_in_folder_or_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JSPEC_MODELS", str(tmp_path))
    monkeypatch.setattr(coder.hub_names, "find", lambda name: tmp_path / "cached" if "0.5b" in name else None)
    with pytest.raises(FileNotFoundError, match=r"1.5b-instruct-q4_k_m.gguf is neither in .* with `hf download Qwen/"):
        coder.find()
    file = tmp_path / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
    file.touch()
    assert coder.find() == (str(file), str(tmp_path / "cached")) and coder.find("a", "b") == ("a", "b")


MISTAKES = {
    "repeats": (["--pair", "qwen-coder", "--repeats", "2"], "--repeats works only without --pair"),
    "draft": (["--draft", "x"], "--draft works only with --pair"),
    "two lengths": (["--num-draft-tokens", "1", "--num-draft-tokens", "2"], "may be repeated only with --pair"),
    "left over": (["--pair", "qwen-coder", "--questions", "9"], "--questions 9 is not a multiple of --batch 8"),
    "short": (["--pair", "qwen-coder", "--tune", "--max-new-tokens", "7"], "--tune needs at least 8 new tokens"),
    "no vocabulary": (["--pair", "qwen-coder", "--draft-vocabulary", "0"], "--draft-vocabulary"),
    "noise": (["--pair", "qwen-coder", "--transformers", "--temperature", "1"], "--transformers decodes only greedily"),
    "vocabulary": (["--draft-vocabulary", "9"], "--draft-vocabulary works only with --pair"),
    "quantised": (["--draft-quantize", "int4"], "--draft-quantize works only with --pair"),
    "no model": (["--pair", "qwen-coder", "--target", "x", "--draft", "lookup"], "requires a draft model"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_ends_command_with_one_sentence(name):
    options, message = MISTAKES[name]
    code, out = answers(*options)
    assert code in (1, 2) and message in out


def test_drafters_use_the_pairs_draft(pair):
    draft = jspec.load(pair[3])
    ways = coder.drafters(coder.Subject("x", None, draft), [2, 4])
    assert [name for name, (drafter, _) in ways.items() if drafter is draft] == [
        "draft model, K = 2",
        "draft model, K = 4",
    ]
    assert ways["lookup, else draft model"][0].second is not None and ways["plain"] == (None, None)


def test_reduced_vocabulary_holds_frequent_tokens_and_ends(pair, monkeypatch):
    monkeypatch.setattr(coder, "read_documents", lambda: [Document("a.py", "a a a")])
    subject = coder.Subject("x", jspec.load(pair[1]), jspec.load(pair[3]), text_pair.tokenizer())
    (first, often, _) = subject.tokenizer.encode("a a a", add_special_tokens=False)
    (end,) = chats.ends(subject)
    assert end != first  # "a" alone is less frequent than " a", so that the end must take its place
    kept = np.flatnonzero(np.asarray(coder.reduced(subject, 2).draft_ids) < 2)
    assert {*kept.tolist()} == {end, often}


def test_small_draft_is_reduced_quantised_or_both(pair, monkeypatch):
    monkeypatch.setattr(coder, "read_documents", lambda: [Document("a.py", "a a a")])
    subject = coder.Subject("x", jspec.load(pair[1]), jspec.load(pair[3]), text_pair.tokenizer())
    assert coder.small_draft(subject, None, None) is None
    for count, kind, name in ((None, "int8", ", int8"), (40, None, ", 40 tokens"), (40, "int8", ", int8, 40 tokens")):
        found, draft = coder.small_draft(subject, count, kind)
        model = draft if count is None else draft.model
        assert found == f"draft model{name}" and model.quantized == kind
        assert model.head.num_tokens == (count or model.config.vocab_size)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--activation-bits", 8, "activation_bits=8"),
        ("--draft-quantize", "int4", "int4"),
        ("--draft-vocabulary", 10**6, "--draft-vocabulary 1000000 is out of range; pass a number from 1 to"),
    ],
)
def test_option_that_does_not_fit_the_models_ends_command_with_one_sentence(pair, option, value, message):
    code, out = answers("--pair", "qwen-coder", *pair, option, value)
    assert code == 1 and message in out and out.endswith(".") and "Traceback" not in out
