"""The training benchmarks: the summaries of their runs, and the commands."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import losses
from bench.guesses import app


@pytest.fixture
def rows(tmp_path):
    """Return ``rows(command, "--steps 2 ...")``, which returns the rows of the table that a command writes."""

    def run(command, options):
        done = CliRunner().invoke(app, [command, *options.split(), "--output", str(tmp_path)])
        assert done.exit_code == 0, done.output
        (file,) = tmp_path.glob("*.json")
        return json.loads(file.read_text())["rows"]

    return run


def test_loss_summary_has_means_and_standard_errors():
    found = losses._summary([[0.5, 0.2, 1.5, 1.2], [0.7, 0.4, 1.9, 1.4]])
    np.testing.assert_allclose(found["accepted"], 0.6)
    np.testing.assert_allclose(found["+- accepted"], 0.1)
    assert list(found)[:4] == ["accepted", "+- accepted", "greedy", "+- greedy"]
    assert losses._summary([[0.5, 0.2, 1.5, 1.2]])["+- greedy"] == 0


@pytest.mark.slow
def test_every_loss_is_trained(rows):
    found = rows("losses", "--texts 32 --steps 2 --depth 2 --seeds 1")
    assert [row["loss"] for row in found] == ["kl", "reverse-kl", "jsd", "tvd", "lk"]


def test_training_step_reports_speed_and_memory(rows):
    (row,) = rows("training", "--kinds blockwise --step-tokens 256 --depth 2 --repeats 1")
    assert row["kind"] == "blockwise" and row["tokens/s"] > 0 and row["kept, MB"] > 4 * row["trained, M"]


@pytest.mark.slow
def test_online_learning_is_measured_after_each_request(rows):
    found = rows("online", "--steps 2 --requests 2 --batch 2 --new-tokens 8")
    assert [row["tokens served"] for row in found] == [16, 32]
    assert found[0]["learning"] == found[0]["as it was"]  # the first request comes before any learning


@pytest.mark.parametrize("options", ["losses --kind owl", "online --kind owl", "training --kinds eagle,owl"])
def test_untrainable_kind_is_rejected(options):
    done = CliRunner().invoke(app, options.split())
    assert done.exit_code == 2 and "'owl' cannot be trained" in done.output
