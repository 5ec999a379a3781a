"""The report on a generation in the command line and the notebooks."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from jspec import theory
from jspec.cli import report
from jspec.core.tree import Tree
from jspec.core.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT, Output, Stats
from jspec.generation import complete as completion
from jspec.tuning.tune_chain import Tuning
from support import text_pair

TOKENIZER = text_pair.tokenizer()
MODEL = SimpleNamespace(config=SimpleNamespace(eos_token_ids=(0,), vocab_size=len(TOKENIZER)))
ORIGINS = [ACCEPTED, ACCEPTED, BONUS, CORRECTED, ACCEPTED, CORRECTED]


def made(origins=ORIGINS, letters="abcdef", invalid=False, end=False):
    """Return the completion of "in" by `letters`, with two draft tokens a round, in one row of two."""
    ids = TOKENIZER(letters)["input_ids"] + [0] * end
    size, columns = len(ids), 8
    rows = (
        np.zeros((2, columns), np.int32),
        np.zeros((2, columns), np.float32),
        np.zeros((2, columns), np.int8),
    )
    for buffer, values in zip(rows, (ids, np.full(size, -0.5), origins), strict=True):
        buffer[0, :size] = values
    accepted = origins.count(ACCEPTED)
    counts = [np.array([n, 1], np.int32) for n in (size - accepted, 2 * (size - accepted), accepted)]
    by_depth = np.array([[2, 1], [0, 0]]), np.array([[accepted + origins.count(CORRECTED), 0], [0, 0]])
    stats = Stats(*counts, *by_depth, np.array([invalid, False]), np.zeros(2))
    out = Output(rows[0], np.array([size, 1]), rows[1], rows[1], rows[2], stats)
    return completion.prepare(TOKENIZER, ["in", "filler"]).completions(MODEL, out)[0]


def test_report_compares_counts_with_theory():
    done = made()
    assert done.text == "abcdef" and done.finish_reason == "length"
    rate = 3 / 5  # three accepted, two rejected
    assert done.stats == {
        "tokens": 6,
        "rounds": 3,
        "drafted": 6,
        "judged": 5,
        "accepted": 3,
        "accepted_at": [2, 1],
        "acceptance_rate": rate,  # with all its digits
        "tokens_per_round": 2.0,
        "predicted_tokens_per_round": pytest.approx(float(theory.expected_tokens(rate, 2))),
    }
    line = report.sentence(done, seconds=2.0)
    assert line == "6 tokens (length) in 3 rounds: 2.00 per round, 1.96 predicted from 60% acceptance; 3 tokens/s"


def test_eos_is_counted_but_not_shown():
    done = made([*ORIGINS, BONUS], end=True)
    assert done.finish_reason == "eos" and done.text == "abcdef" and done.stats["tokens"] == 7


def test_plain_decoding_has_no_acceptance_rate():
    done = made([BONUS] * 6)
    assert done.stats["acceptance_rate"] is None and done.stats["predicted_tokens_per_round"] is None
    assert report.sentence(done, seconds=2.0) == "6 tokens (length) in 6 rounds; 3 tokens/s"


def test_non_finite_logits_are_rejected():
    with pytest.raises(ValueError, match="logits are not finite"):
        made(invalid=True)


def test_json_is_complete():
    line = json.loads(json.dumps(report.as_json(made())))
    assert (line["prompt"], line["text"], line["finish_reason"]) == ("in", "abcdef", "length")
    assert line["origins"] == ["accepted", "accepted", "bonus", "corrected", "accepted", "corrected"]
    assert len(line["tokens"]) == len(line["logprobs"]) == 6 and line["stats"]["rounds"] == 3


def test_every_token_has_colour_of_its_origin():
    shown = report.coloured(made())
    assert shown.plain == "inabcdef" and shown.style == ""
    styles = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    assert [styles[letter] for letter in "abcdef"] == [report.COLOURS[origin] for origin in ORIGINS]
    assert len(set(report.COLOURS.values())) == 4
    assert report.legend().plain == "prompt accepted corrected bonus no draft"


def test_marks_show_origins_without_colours():
    done = made([ACCEPTED, BONUS, CORRECTED, CORRECTED, NO_DRAFT, ACCEPTED])
    shown = report.marked(done)
    assert shown.plain == "in►a°b°«cd»¦e¦f" and not shown.spans
    assert report.legend(marks=True).plain == "prompt► accepted «corrected» °bonus° ¦no draft¦"
    assert len(set(report.MARKS.values())) == len(report.NAMES)
    assert report.marked(made(letters="\x1b[3m\n\t")).plain == "in►\ufffd[°3°«m»\n«\t»"


def test_control_characters_are_not_printed():
    shown = report.coloured(made(letters="\x1b[3m\n\t")).plain
    assert shown == "in\ufffd[3m\n\t"


def test_tuning_report_has_table_and_recommendation():
    found = Tuning(3, 1.25, 0.010, (0.016, 0.018, 0.020, 0.022), (1.5, 2.0, 2.5, 2.7))
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(report.tuning_table(found, {"batch": 4, "device": "cpu"}))
    lines = [line.split() for line in screen.export_text(clear=False).splitlines()]
    assert ["batch", "4,", "device", "cpu"] in lines and ["plain", "10", "1.00", "100", "1.00x"] in lines
    assert ["1", "16", "1.50", "94", "0.94x"] in lines and ["3", "~20", "2.50", "125", "1.25x", "<-", "best"] in lines
    assert "~ interpolated; tokens/s of each text" in screen.export_text(clear=False)
    assert report.advice(found) == "use num_draft_tokens=3 (1.25x plain)"


def test_fully_timed_lengths_are_not_called_interpolated():
    found = Tuning(2, 1.25, 0.010, (0.016, 0.018), (1.5, 2.0))
    assert report.tuning_table(found, {}).caption == "tokens/s of each text"


def test_tuning_report_may_recommend_tree():
    found = Tuning(2, 1.25, 0.010, (0.016, 0.018), (1.5, 2.0), Tree((0, 0, 1)), 1.5)
    lines = [[*row] for row in zip(*(column.cells for column in report.tuning_table(found, {}).columns), strict=True)]
    assert lines[-1] == ["tree", "", "", "150", "1.50x", "<- best"] and [line[-1] for line in lines[:-1]] == [""] * 3
    assert report.advice(found) == "use jspec.Tree((0, 0, 1)), or --tree 0,0,1 (1.50x plain; num_draft_tokens=2 1.25x)"
    found = Tuning(0, 1.0, 0.010, (0.016,), (1.5,), Tree((0, 0)), 1.125)
    assert report.advice(found).endswith("(1.12x plain; plain decoding 1.00x)")


def test_tuning_report_may_advise_against_drafting():
    found = Tuning(0, 1.0, 0.010, (0.020, 0.024), (1.5, 2.0))
    assert report.advice(found).startswith("do not speculate: at best, with num_draft_tokens=2, it would run at 0.83x")
