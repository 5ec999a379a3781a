"""The benchmarks of training: what they make of their runs, and the commands."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from bench import losses
from bench.guesses import app


def test_means_and_errors_over_seeds():
    found = losses._summary([[0.5, 0.2, 1.5, 1.2], [0.7, 0.4, 1.9, 1.4]])
    np.testing.assert_allclose(found["accepted"], 0.6)
    np.testing.assert_allclose(found["+- accepted"], 0.1)
    assert list(found)[:4] == ["accepted", "+- accepted", "greedy", "+- greedy"]
    assert losses._summary([[0.5, 0.2, 1.5, 1.2]])["+- greedy"] == 0


@pytest.mark.slow
def test_every_loss_is_trained_with(tmp_path):
    few = ["--texts", "32", "--steps", "2", "--depth", "2", "--seeds", "1", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["losses", *few])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("*.json")
    assert [row["loss"] for row in json.loads(file.read_text())["rows"]] == ["kl", "reverse-kl", "jsd", "tvd", "lk"]


def test_what_a_step_is_made_of(tmp_path):
    few = ["--kinds", "blockwise", "--step-tokens", "256", "--depth", "2", "--repeats", "1", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["training", *few])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("*.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert row["kind"] == "blockwise" and row["tokens/s"] > 0 and row["kept, MB"] > 4 * row["trained, M"]


@pytest.mark.slow
def test_a_domain_that_is_new(tmp_path):
    few = ["--steps", "2", "--requests", "2", "--batch", "2", "--new-tokens", "8", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, ["online", *few])
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["tokens served"] for row in rows] == [16, 32]
    assert rows[0]["learning"] == rows[0]["as it was"]  # the first request is before all learning
