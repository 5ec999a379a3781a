"""The chat-model benchmarks on a tiny model, and their comparison of outputs."""

import importlib.util
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure
from typer.testing import CliRunner

import jspec
from bench import agreement, answers, chats, first_answer, llamacpp, plots, rivals
from bench.__main__ import app
from bench.subject import Subject
from jspec.text import load_tokenizer
from jspec.training import dataset as rows
from pair.corpus import Document
from support import eagle_heads, text_pair
from support.templates import TEMPLATE

pytestmark = pytest.mark.usefixtures("quick_compile")
TOKENIZER = text_pair.tokenizer()
TOKENIZER.chat_template = TEMPLATE


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """Return the folder of a tiny target with a chat template and enough positions for all questions."""
    folder = text_pair.write(tmp_path_factory.mktemp("bench") / "chatty", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def bench(chatty, tmp_path):
    """Return ``bench(command, *options)``, which returns the report that a command writes for the tiny target."""

    def run(command, *options):
        done = CliRunner().invoke(app, [command, "--target", str(chatty), "--output", str(tmp_path), *options])
        assert done.exit_code == 0, done.output
        (file,) = tmp_path.glob(f"{command}*.json")
        assert file.with_suffix(".png").exists()
        return json.loads(file.read_text())

    return run


@pytest.fixture
def short(monkeypatch):
    """Use two short questions of each kind, and a short corpus."""
    monkeypatch.setattr(chats, "questions", lambda kind: [f"the {kind}", "in a"])
    monkeypatch.setattr(agreement, "load_corpus", lambda: ([Document("a.py", "def f():\n    pass\n")], []))


def test_questions_are_distinct_and_sixteen_per_kind():
    found = [question for kind in chats.KINDS for question in chats.questions(kind)]
    assert len(set(found)) == len(found) == 64


def test_questions_use_chat_template():
    row = chats.rows(TOKENIZER, "code", 1)[0]
    assert TOKENIZER.decode(row) == f"[user]{chats.questions('code')[0]}\n[assistant]"


def test_requests_keep_question_order():
    asked = [np.arange(1, n) for n in (5, 40, 9)]
    found = chats.requests(TOKENIZER, asked, 2)
    assert [tokens.shape for tokens, *_ in found] == [(2, 64), (1, 32)]
    rows = [row[:n].tolist() for tokens, lengths, _ in found for row, n in zip(tokens, lengths, strict=True)]
    assert rows == [one.tolist() for one in asked]


@pytest.mark.parametrize(
    ("gaps", "tokens", "at"),
    [
        ([1, 1, 1], [5, 6, 7], None),
        ([1, 1, 1], [5, 4, 7], 1),
        ([1, 1, 1], [5, 6], 2),
        ([1, 1, 1], [5, 6, 7, 8], 3),
        ([1, 1e-4, 1], [5, 4, 7], None),
        ([1, 1e-4, 1], [5], None),
        ([1, 1, 1e-4], [5, 4, 7], 1),
        ([1e-4, 1e-4, 1], [1, 2, 3], None),
    ],
)
def test_texts_may_differ_after_near_tie(gaps, tokens, at):
    assert agreement.Expected("code 1", [5, 6, 7], np.array(gaps)).parts(tokens) == at


@pytest.mark.parametrize(("text", "kept"), [([3, 0, 4, 0], [3, 0]), ([3, 4], [3, 4]), ([0], [0]), ([], [])])
def test_text_is_cut_after_first_eos(text, kept):
    assert rivals.to_end(text, (0,)) == kept


def test_transformers_greedy_tokens_and_gaps_match_unbatched_rows(chatty):
    """Each row of a batch is decoded as it is alone, with the gaps of its own logits."""
    torch = pytest.importorskip("torch")
    target = jspec.load(chatty)
    subject = agreement.Subject("x", target, None, TOKENIZER)
    asked = {"long": np.arange(1, 30), "short": np.arange(40, 45)}
    together = agreement.expected(subject, asked, 2, 6)
    twin = rivals.twin(target)
    for one, prompt in zip(together, asked.values(), strict=True):
        ids = prompt.tolist()
        for token, gap in zip(one.tokens, one.gaps, strict=True):
            with torch.no_grad():
                first, second = twin(torch.tensor([ids])).logits[0, -1].topk(2).values.tolist()
            assert gap == pytest.approx(first - second, abs=1e-3)
            ids.append(token)
        assert one.tokens == rivals.greedy(twin, [prompt], 6, (0,))[0][0]


def test_answers_agree_with_transformers(bench, short, monkeypatch):
    pytest.importorskip("torch")
    made = agreement.made
    monkeypatch.setattr(agreement, "made", lambda *args: dict(itertools.islice(made(*args).items(), 2)))
    report = bench("agreement", "--requests", "1", "--batch", "2", "--max-new-tokens", "12", "--num-draft-tokens", "1")
    assert [row["drafter"] for row in report["rows"]] == ["plain", "lookup"]
    for row in report["rows"]:
        assert row["identical, %"] == 100 and row["texts"] == 4 and row["compared"] > 12
    assert "4 chats, 12 new tokens at most, batch 2" in report["title"]
    assert report["notes"][-1] == "Texts that differ elsewhere: none."


def test_differing_texts_are_named(bench, short, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(agreement, "made", lambda *_: {"plain": None})
    right = agreement.expected
    monkeypatch.setattr(
        agreement,
        "expected",
        lambda *args: [
            agreement.Expected(one.question, [*one.tokens[:2], -1, *one.tokens[3:]], np.ones(len(one.tokens)))
            for one in right(*args)
        ],
    )
    report = bench("agreement", "--requests", "1", "--batch", "2", "--max-new-tokens", "12")
    assert report["rows"][0]["identical, %"] == 0 and report["rows"][0]["to the end"] == 0
    assert "plain: chat 1, token 2; plain: summary 1, token 2" in report["notes"][-1]


def test_agreement_compares_every_drafter(chatty, short):
    subject = agreement.Subject("x", jspec.load(chatty), None, TOKENIZER)
    found = agreement.made(subject, {"code 1": np.arange(1, 9)})
    assert list(found)[:4] == ["plain", "lookup", "retrieval", "unigram"]
    assert sum(isinstance(one, jspec.EarlyExitDrafter) for one in found.values()) == 2
    assert sum(isinstance(one, jspec.FallbackDrafter) for one in found.values()) == 3


def test_target_without_chat_template_is_rejected(tmp_path):
    pytest.importorskip("torch")
    folder = text_pair.write(tmp_path / "mute")
    done = CliRunner().invoke(app, ["agreement", "--target", str(folder), "--output", str(tmp_path)])
    assert done.exit_code == 1 and "has no chat template" in done.output and done.output.count("\n") == 1


def test_missing_torch_is_an_error(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    done = CliRunner().invoke(app, ["agreement"])
    assert done.exit_code == 1 and "pip install torch" in done.output


def test_answers_are_timed_by_kind_batch_and_program(bench, short, monkeypatch):
    monkeypatch.setattr(chats, "KINDS", ("chat", "code"))
    monkeypatch.setattr(answers, "early_exit", lambda _: {})  # compiling them takes most of the time
    options = "--requests 1 --batch 1 --batch 2 --num-draft-tokens 1 --max-new-tokens 6 --repeats 1"
    report = bench("answers", *options.split())
    rows = {(row["question"], row["batch"], row["program"]): row for row in report["rows"]}
    kinds = *chats.KINDS, "all"
    assert {(kind, batch) for kind, batch, _ in rows} == {(kind, batch) for kind in kinds for batch in (1, 2)}
    for (kind, batch, program), row in rows.items():
        count = batch * (len(chats.KINDS) if kind == "all" else 1)
        assert row["tokens/s"] > 0 and row["same texts"] == f"{count} of {count}"
        assert (row["tokens per round"] != "") == (program in ("lookup", "recycling, 8 nodes"))
    assert rows["code", 1, "plain"]["x plain"] == 1
    if importlib.util.find_spec("torch"):
        assert rows["chat", 1, "lookup"]["x transformers lookup"] > 0
        assert rows["chat", 2, "lookup"]["x transformers plain"] > 0
        assert rows["chat", 2, "lookup"]["x transformers lookup"] == ""
    assert ("llama_cpp is not installed" in report["notes"][1]) == (importlib.util.find_spec("llama_cpp") is None)


def test_head_is_measured_with_other_drafters(bench, short, monkeypatch, chatty, tmp_path):
    monkeypatch.setattr(chats, "KINDS", ("chat",))
    head = jspec.EagleDrafter(eagle_heads.eagle(jspec.load(chatty), features=(0, 1))).save(tmp_path / "head")
    options = "--requests 1 --batch 1 --num-draft-tokens 1 --max-new-tokens 4 --repeats 1 --temperature 1 --tree 0,0"
    report = bench("answers", *options.split(), "--head", str(head))
    rows = {row["program"]: row for row in report["rows"]}
    assert {"head", "head, tree", "lookup"} <= set(rows) and "transformers plain" not in rows
    assert all(row["tokens per round"] >= 1 for name, row in rows.items() if name != "plain")
    done = CliRunner().invoke(app, ["answers", "--target", str(chatty), "--tree", "0"])
    assert done.exit_code == 2 and "pass --head" in done.output


def test_held_out_training_questions_are_used(bench, short, chatty, tmp_path):
    (tmp_path / rows.TEXTS).mkdir()
    chats_ = [rows.of_answer([1, 2 + i % 50, 5 + i // 50], [5, 6, 7]) for i in range(100)]
    rows.save([*chats_, rows.of_answer([], range(9))], tmp_path / rows.TEXTS / "00000.safetensors")
    held_out = {tuple(row.tokens[:3]) for row in rows.divide(chats_)[1]}
    found = chats.by_kind(None, len(held_out), tmp_path)["held out"]
    assert 1 < len(held_out) < 20 and sorted(map(tuple, found)) == sorted(held_out)
    options = "--requests 2 --batch 1 --num-draft-tokens 1 --max-new-tokens 3 --repeats 1 --temperature 1"
    report = bench("answers", *options.split(), "--held-out", str(tmp_path))
    assert {row["question"] for row in report["rows"]} == {"held out"}
    assert {row["same texts"].split()[-1] for row in report["rows"]} == {"2"}
    rows.save(chats_[:2], tmp_path / rows.TEXTS / "00000.safetensors")
    done = CliRunner().invoke(app, ["answers", "--target", str(chatty), "--held-out", str(tmp_path)])
    assert done.exit_code == 1 and "holds out 1 questions" in " ".join(done.output.split())


@pytest.mark.parametrize("branches", [True, False])
def test_tree_head_is_not_combined_with_lookup(branches, chatty):
    target = jspec.load(chatty)
    head = (
        jspec.PassDrafter.untrained(target, 2, rngs=nnx.Rngs(0))
        if branches
        else jspec.MedusaDrafter.untrained(target, 2, rngs=nnx.Rngs(0))
    )
    names = answers.drafters(Subject("x", target, head), 2, ())
    assert "head" in names and ("lookup, else head" in names) is not branches


def test_one_question_is_chosen_per_compiled_width(chatty):
    asked = [np.arange(size) for size in (3, 4, 200, 5, 210)]
    tokenizer = load_tokenizer(chatty)
    assert [row.size for row in answers.one_batch_per_width(tokenizer, asked, 1)] == [5, 210]
    assert [row.size for row in answers.one_batch_per_width(tokenizer, asked[:4], 2)] == [3, 4, 200, 5]


def test_readings_of_all_kinds_are_added():
    kinds = ({"plain": [[1]], "lookup": [[1]]}, {"plain": [[2]]})
    times = ({name: np.array([1.0, 2.0]) for name in outs} for outs in kinds)
    outs, seconds = answers._merged(list(zip(kinds, times, strict=True)))
    assert outs == {"plain": [[1], [2]]} and seconds["plain"].tolist() == [2, 4]


def test_speeds_count_each_programs_own_tokens():
    rows = answers._rows(
        "code",
        1,
        {"plain": [[1, 2, 3, 0]], "llama.cpp": [[1, 0]]},
        {"plain": np.array([2.0, 2.0]), "llama.cpp": np.array([4.0, 4.0])},
    )
    assert [row["tokens/s"] for row in rows] == [2, 0.5]
    assert [row["x llama.cpp"] for row in rows] == [4, 1] and rows[1]["x plain"] == 0.25
    assert rows[1]["same texts"] == "0 of 1"


@pytest.mark.parametrize(("limit", "text"), [(9, [5, 6, 0]), (2, [5, 6])])
def test_llama_cpp_stops_at_eos_or_limit(limit, text):
    llm = SimpleNamespace(reset=lambda: None, generate=lambda ids, temp: iter([*ids, 0, 7]))
    assert llamacpp.answer(llm, np.array([5, 6]), limit, (0,)) == text


def test_answers_plot_has_bar_per_program():
    rows = [
        {"question": kind, "batch": batch, "program": name, "tokens/s": batch * speed}
        for kind in ("chat", "code")
        for batch in (1, 8)
        for name, speed in (("plain", 2), ("lookup", 3))
        if (batch, name) != (8, "lookup")
    ]
    figure = Figure()
    plots.answers(figure, rows)
    assert [[bar.get_width() for bar in panel.patches] for panel in figure.axes] == [[2, 2, 3, 3], [16, 16]]
    assert len({bar.get_y() for bar in figure.axes[0].patches}) == 4


def test_first_answer_starts_from_empty_folder(monkeypatch):
    """All paths in commands are in the empty folder, except the clone's source; the second answer is not counted."""
    done, published = [], {}

    def timed(step, folder):
        variables = first_answer.environment(folder)
        assert folder in Path(variables["XDG_CACHE_HOME"]).parents
        assert not {"JAX_COMPILATION_CACHE_DIR", "PYTHONPATH"} & variables.keys()
        paths = [part for part in step.command if isinstance(part, Path) and part != first_answer.ROOT]
        assert all(folder in path.parents for path in paths)
        if step.downloads:
            (folder / "wheels").mkdir(exist_ok=True)
            (folder / "wheels" / step.name).write_bytes(b"x" * 2_000_000)
        done.append(step.name)
        return 10.0 ** len(done), "Paris.\n"

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "there")
    monkeypatch.setenv("PYTHONPATH", "there")
    monkeypatch.setattr(first_answer, "_timed", timed)
    monkeypatch.setattr(first_answer, "publish", lambda *args, **facts: published.update(facts, rows=args[2]))
    first_answer.run()
    assert done[0] == "clone" and done[-2:] == ["first answer", "second answer"]
    assert published["seconds"] == 11_111_110 and published["seconds_of_downloads"] == 1e3 + 1e5
    assert [row["step"] for row in published["rows"] if row["MB"] == 2] == ["packages", "model"]
    assert "(4 MB)" in published["notes"][0] and published["notes"][1].endswith("France? Paris.")
