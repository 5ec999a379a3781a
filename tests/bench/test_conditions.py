"""The conditions that results record: versions, and the command without the user's folder."""

import numpy as np

from bench import conditions


def test_conditions_do_not_name_the_home_folder(monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench", "latency", "--target", str(conditions.Path.home() / "models" / "a.gguf")])
    assert conditions.conditions()["command"] == "python -m bench latency --target ~/models/a.gguf"


def test_conditions_report_installed_versions():
    assert conditions.conditions()["numpy"] == np.__version__
    assert conditions._version("no-such-package") is None
