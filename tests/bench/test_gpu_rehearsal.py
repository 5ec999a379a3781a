"""The whole drill on a fresh copy: packed, in an environment like its machine's, without a network."""

import json
import os
import shutil
import subprocess
import time

import pytest

from bench.gpu.steps import STEPS
from support.places import ROOT

WITHOUT_TORCH = "rivals"  # measures transformers with torch, which takes gigabytes


def _python():
    """Return a Python 3.12 that starts, or None."""
    path = shutil.which("python3.12")
    return path if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0 else None


PYTHON = _python()
# Neither pip nor anything else may reach a server.
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "HF_HUB_OFFLINE": "1",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}


def _command(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a copy of the tree with the packed wheels, but without other files that git ignores."""
    _command("bash", "bench/gpu/pack", cwd=ROOT)
    folder = tmp_path_factory.mktemp("tree")
    names = _command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "bench/gpu/wheels", folder / "bench/gpu/wheels")
    return folder


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="the machine of the drill has Python 3.12")
def test_packed_drill_passes_rehearsal(tree, tmp_path, report):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    _command(PYTHON, "-m", "venv", str(tmp_path / "machine"))
    python = str(tmp_path / "machine/bin/python")
    _command(python, "-m", "pip", "install", "-q", "-r", "bench/gpu/machine.txt", cwd=tree, env=environment)
    here = OFFLINE | {"PYTHON": python, "OUT": str(tmp_path / "out"), "TMPDIR": str(tmp_path)}
    begin = time.monotonic()
    go = subprocess.run(
        ["bash", "bench/gpu/go", "--rehearse", "--seconds", "1200"],
        cwd=tree,
        env=environment | here,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    report(seconds=f"{time.monotonic() - begin:.0f}")
    files = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").iterdir()}
    assert len(files) == len(STEPS) + 1, go.stdout[-3000:] + go.stderr[-3000:]
    for entry in files["drill.json"]["steps"]:
        rows = files[entry["file"]]["rows"]
        if entry["step"] == WITHOUT_TORCH:
            assert rows[-1]["error"] == "ModuleNotFoundError: No module named 'torch'"
            continue
        assert entry["state"] == "done" and rows, entry
        assert [row for row in rows if "error" in row or row.get("ok") is False] == []
    assert files["drill.json"]["conditions"]["jax"] == "0.11.2"
    assert files["drill.json"]["conditions"]["commit"] in (tree / "bench/gpu/wheels/commit").read_text()
