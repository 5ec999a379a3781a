"""CI checks of the notebooks: which outputs count as stale, and how the install cell fails. None is run here."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
_spec = importlib.util.spec_from_file_location("check", FOLDER / "check.py")
assert _spec is not None and _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)

NOTEBOOKS = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in FOLDER.glob("*.ipynb")}


def printed(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def drawn(**data):
    return {"output_type": "display_data", "metadata": {}, "data": {k.replace("_", "/"): v for k, v in data.items()}}


def notebook(*outputs, tags=()):
    """Return a notebook of a text cell followed by one code cell with `outputs`."""
    return {
        "cells": [
            {"cell_type": "markdown", "metadata": {}, "source": ""},
            {"cell_type": "code", "metadata": {"tags": [*tags]}, "outputs": [*outputs], "execution_count": None},
        ]
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([printed("1 of 2\n")], [printed("1 of 3\n")]),
        ([printed("a\n")], []),
        ([], [printed("a\n")]),
        ([drawn(text_plain="a", text_html="<b>a</b>")], [drawn(text_plain="a", text_html="<i>a</i>")]),
        ([drawn(text_plain="a")], [drawn(text_plain="a", image_png="")]),
        ([printed("a\n"), drawn(text_plain="b")], [drawn(text_plain="b"), printed("a\n")]),
    ],
)
def test_changed_output_is_stale(old, new):
    found = check.differences(notebook(*old), notebook(*new))
    assert list(found) == [1] and "committed" in found[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([printed("a\nb\n")], [printed("a\n"), printed("b\n")]),
        ([printed("a\n")], [printed("a warning", "stderr"), printed("a\n")]),
        ([drawn(image_png="AAAA")], [drawn(image_png="BBBB")]),
    ],
)
def test_random_differences_are_not_stale(old, new):
    assert not check.differences(notebook(*old), notebook(*new))


def test_varying_cells_still_compare_words_and_shape():
    table = "┏━━━━┓\n┃ K  ┃\n│ {} │\n"
    old = notebook(printed(table.format("9.5 ms ")), tags=["varies"])
    for text, stale in (
        (table.format("10.25 ms").replace("━━━━", "━━━━━"), False),
        (table.format("9.5 s"), True),
        (table.format("9.5 ms ") * 2, True),
    ):
        new = notebook(printed(text), tags=["varies"])
        assert bool(check.differences(old, new)) == stale
        assert check.differences(notebook(printed("9.5")), notebook(printed("9.6")))


def test_tidying_outputs_does_not_modify_notebook():
    outputs = [printed("a\n"), printed("b\n")]
    assert check.tidy(outputs) == [printed("a\nb\n")] and outputs == [printed("a\n"), printed("b\n")]


@pytest.fixture
def updated(monkeypatch, tmp_path):
    """Return ``updated(committed, fresh)``, which gives two cells' outputs after --update; the first cell varies."""

    def made(figure, text):
        cells = notebook(printed(figure), tags=["varies"])["cells"] + notebook(printed(text))["cells"]
        return {"cells": cells}

    def update(committed, fresh):
        file = tmp_path / "made.ipynb"
        file.write_text(json.dumps(made(*committed)))
        client = SimpleNamespace(
            NotebookClient=lambda nb, **_: SimpleNamespace(execute=lambda: nb.update(made(*fresh)))
        )
        files = SimpleNamespace(
            read=lambda file, as_version: json.loads(file.read_text()),
            write=lambda nb, file: file.write_text(json.dumps(nb)),
        )
        monkeypatch.setitem(sys.modules, "nbclient", client)
        monkeypatch.setitem(sys.modules, "nbformat", files)
        assert check.check(file, update=True)
        return [cell["outputs"][0]["text"] for cell in json.loads(file.read_text())["cells"] if "outputs" in cell]

    return update


def test_outputs_come_from_one_run(updated):
    """Varying figures count as unchanged, unless another cell changed; then all outputs come from the new run."""
    assert updated(["K = 4", "a"], ["K = 1", "b"]) == ["K = 1", "b"]
    assert updated(["K = 4", "a"], ["K = 1", "a"]) == ["K = 4", "a"]


def test_profile_notebook_times_predicted_best_length():
    outputs = json.dumps([cell.get("outputs") for cell in NOTEBOOKS["profile"]["cells"]])
    ((best, speedup),) = re.findall(r"best K, 0 for plain decoding: (\d+) \(predicted speed-up ([\d.]+)\)", outputs)
    ((raced, predicted),) = re.findall(r"K = (\d+): predicted ([\d.]+)", outputs)
    assert (raced, predicted) == (best, speedup) or (best, raced) == ("0", "4")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_at_most_half_of_cells_vary(name):
    """At most half of the cells vary, which show times or versions; text, tokens and counts are in other cells."""
    cells = [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code" and cell["outputs"]]
    loose = [cell for cell in cells if check.VARIES in cell["metadata"].get("tags", [])]
    assert len(loose) <= len(cells) / 2


class UsageError(Exception):
    """A stand-in for IPython's `UsageError`, which IPython shows as its message alone, without a traceback."""


@pytest.fixture(params=NOTEBOOKS)
def install(monkeypatch, request):
    """Return ``install(jspec=None, code=0)``: pip's arguments; the cell finds `jspec`, and pip exits with `code`."""
    (source,) = (
        text for cell in NOTEBOOKS[request.param]["cells"] if "Install jspec" in (text := "".join(cell["source"]))
    )

    def execute(jspec=None, code=0):
        commands = []

        def run(command, **_):
            commands.append(command)
            error = "  fatal: Could not resolve host\nERROR: of git\n"
            return SimpleNamespace(returncode=1 if command == ["nvidia-smi"] else code, stderr=error)

        with monkeypatch.context() as patch:
            patch.setattr(importlib.util, "find_spec", lambda name: jspec)
            patch.setattr(subprocess, "run", run)
            patch.delitem(sys.modules, "jax", raising=False)
            for module in ("IPython", "IPython.core", "IPython.core.error"):
                patch.setitem(sys.modules, module, SimpleNamespace(UsageError=UsageError))
            exec(source, {})
        return [command[3:] for command in commands if "pip" in command]

    monkeypatch.delenv("JSPEC_SOURCE", raising=False)
    return execute


def test_installed_jspec_is_not_reinstalled(install):
    assert install(jspec="found") == []


def test_repository_location_can_be_overridden(install, monkeypatch, tmp_path):
    url = "git+https://example.org/jspec.git"
    places = {
        url: url,
        url.removeprefix("git+"): url,
        str(tmp_path): tmp_path.as_uri(),
        tmp_path.as_uri(): tmp_path.as_uri(),
    }
    for source, expected in places.items():
        monkeypatch.setenv("JSPEC_SOURCE", source)
        ((command, *_, requirement),) = install()
        assert command == "install" and requirement.split(" @ ")[1] == expected


def test_unreachable_repository_gives_one_sentence(install):
    with pytest.raises(UsageError, match=r"from https://github.*\(Could not resolve host\); set JSPEC_SOURCE"):
        install(code=1)
