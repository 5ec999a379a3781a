"""`python -m bench serve`: a small run of clients against a real server."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from bench import serve
from bench.__main__ import app
from support import text_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    prompts = folder / "prompts.txt"
    prompts.write_text("in a thing, in a\nthe thing\n", encoding="utf-8")
    return text_pair.write(folder / "mine"), text_pair.write(folder / "its-draft", distance=2.0), prompts


def bench(*words):
    done = CliRunner().invoke(app, ["serve", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_serve_rows_summarise_answers():
    """Results are medians over turns and sums over answers, for two made-up turns of two answers each."""
    drafts = {"rounds": 10, "drafted": 20, "judged": 18, "accepted": 6}
    none = dict.fromkeys(drafts, 0) | {"rounds": 30}
    slow, fast = (serve.Answer(first, 0.02, 30, drafts) for first in (0.4, 0.1))
    found = {
        "plain": [(3.0, [dataclasses.replace(slow, drafts=none)] * 2)] * 2,
        "with the draft": [(2.0, [slow, fast]), (1.0, [fast, fast])],
    }
    traffic = serve.Traffic(["a"], 30, 0.0, [2], first=0.2, each=0.02)
    plain, drafted = serve._rows("2 at once", found, traffic, 0.25)
    assert (plain["tokens/s"], plain["good per second"], plain["theory"], plain["tokens per round"]) == (20, 0, 1, 1)
    assert drafted["tokens/s"] == 45 and drafted["x plain"] == 2.25 and drafted["good per second"] == 1
    assert drafted["acceptance"] == pytest.approx(1 / 3) and drafted["tokens per round"] == 3
    assert drafted["theory"] == pytest.approx((1 + 1 / 3 + 1 / 9) / 1.5)
    assert (drafted["TTFT p50, ms"], drafted["TPOT p99, ms"]) == pytest.approx((100, 20))
    assert (
        "Only 0.33 of the verified draft tokens were accepted; a smaller"
        in serve._notes([plain, drafted], traffic, 0.25)[1]
    )
    assert len(serve._notes([plain], traffic, 0.25)) == 1


@pytest.mark.slow
def test_every_load_is_measured_on_both_servers(pair, tmp_path):
    target, draft, prompts = pair
    loads = "--clients 1 --clients 3 --slots 2 --repeats 1 --first-ms 60000 --token-ms 60000"
    texts = "--max-new-tokens 9 --num-draft-tokens 2 --temperature 1"
    files = "--target", target, "--draft", draft, "--prompts", prompts, "--output", tmp_path
    code, out = bench(*files, *loads.split(), *texts.split())
    assert code == 0, out
    (file,) = tmp_path.glob("*.json")
    assert file.name == "serve-mine-its-draft-k2-s2-t1.json" and file.with_suffix(".png").exists()
    found = json.loads(file.read_text())
    rows = found["rows"]
    assert [row["server"] for row in rows] == ["plain", "with the draft"] * 5
    assert [row["load"] for row in rows][::2][:2] == ["1 at once", "3 at once"]
    plain, drafted = rows[::2], rows[1::2]
    assert all(
        row["tokens per round"] == row["x plain"] == row["theory"] == 1 and row["acceptance"] == "" for row in plain
    )
    assert all(1 < row["tokens per round"] <= 3 and 0 < row["acceptance"] < 1 for row in drafted)
    for row in rows:
        assert 0 < row["TTFT p50, ms"] <= row["TTFT p99, ms"] and 0 <= row["TPOT p50, ms"] <= row["TPOT p99, ms"]
        assert row["good per second"] > 0
    # The same seeds give the same outputs, so every load does the same work with the same acceptance.
    assert drafted[0]["acceptance"] == pytest.approx(drafted[1]["acceptance"], abs=0.2)
    advised = min(row["acceptance"] for row in drafted) < 0.5
    assert any("smaller --num-draft-tokens" in note for note in found["notes"]) == advised


def test_mistakes_give_one_sentence(pair, tmp_path):
    target, _, prompts = pair
    code, out = bench("--target", target)
    assert code == 2 and "--target requires --prompts, a file" in out
    code, out = bench("--target", tmp_path / "nothing", "--prompts", prompts)
    assert code == 1 and out.startswith("jspec serve has ended: ") and "nothing" in out
