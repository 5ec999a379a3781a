"""A conversion killed at any point leaves no half-written result that loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import convert
from convert import CheckpointError
from support.checkpoints import make

# The driver imports once, then forks a converter for each job, so that a kill costs milliseconds. A job is
# [target, format, point, fraction]. At a point (module, function, before or after), the process kills itself.
# Without a point, it is killed from outside after that fraction of the time that a whole conversion took.
DRIVER = """
import importlib, json, os, signal, sys, time
from orbax.checkpoint import v1
import convert

def plant(module, name, when):
    owner = importlib.import_module(module)
    original = getattr(owner, name)
    def planted(*args, **kwargs):
        result = None if when == "before" else original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, planted)

def run(source, target, to, point, delay):
    pid = os.fork()
    if pid == 0:
        if point:
            plant(*point)
        (convert.save if to == "orbax" else convert.save_hf)(convert.load(source), target)
        os._exit(0)
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL

source, whole, jobs = sys.argv[1], sys.argv[2], json.load(sys.stdin)
seconds = {}
for to in ("orbax", "hf"):
    seconds[to] = float("inf")
    for turn in range(3):  # the first is slower than those that follow, and would have kills come too late
        start = time.perf_counter()
        assert not run(source, f"{whole}{to}{turn}", to, None, None)
        seconds[to] = min(seconds[to], time.perf_counter() - start)
for target, to, point, fraction in jobs:
    delay = None if fraction is None else fraction * seconds[to]
    print(json.dumps(run(source, target, to, point, delay)), flush=True)
"""
POINTS = [
    ("orbax", ("convert.saving", "carry", "before")),
    ("orbax", ("convert.saving", "carry", "after")),
    ("orbax", ("convert.store", "_context", "before")),
    ("orbax", ("convert.store", "write", "after")),
    ("orbax", ("convert.manifest", "_digest", "after")),
    ("orbax", ("convert.manifest", "write", "before")),
    ("orbax", ("convert.manifest", "write", "after")),
    ("hf", ("convert.to_hf", "save_file", "before")),
    ("hf", ("convert.to_hf", "save_file", "after")),
    ("hf", ("convert.to_hf", "_write_index", "after")),
    ("hf", ("shutil", "copyfile", "after")),
    ("hf", ("convert.saving", "carry", "after")),
]
# Points at which everything is written and only the rename remains.
COMPLETE = [("orbax", ("convert.manifest", "write", "after")), ("hf", ("convert.saving", "carry", "after"))]


def drive(root: Path, jobs: list) -> list[bool]:
    """Run jobs (format, point, fraction) into root/out/0, 1, ...; return whether each one was killed."""
    source = make(root / "hf", shards=2, num_hidden_layers=6)
    (root / "out").mkdir()
    named = json.dumps([(str(root / "out" / str(i)), *job) for i, job in enumerate(jobs)])
    environment = os.environ | {
        "PYTHONPATH": str(Path(convert.__file__).parents[1]),
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-c", DRIVER, str(source), str(root / "whole-")]
    done = subprocess.run(
        command, input=named, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def at_any_time(count: int) -> list:
    return [("orbax" if i % 2 else "hf", None, 1.1 * i / count) for i in range(count)]


def check_remains(root: Path, index: int) -> bool:
    """Return whether job `index` left a complete result; anything else that it left must be rejected."""
    target = root / "out" / str(index)
    for remains in target.parent.glob(f".{index}.partial-*"):
        with pytest.raises(CheckpointError, match="left by a conversion that was stopped"):
            convert.load(remains)
    if not target.exists():
        return False
    expected, actual = convert.load(root / "hf").params, convert.load(target).params
    assert {n: a.tobytes() for n, a in actual.items()} == {n: a.tobytes() for n, a in expected.items()}
    return True


@pytest.fixture(scope="module")
def driven(tmp_path_factory) -> tuple[Path, list[bool]]:
    root = tmp_path_factory.mktemp("killed")
    return root, drive(root, [(to, point, None) for to, point in POINTS] + at_any_time(20))


@pytest.mark.parametrize("index", range(len(POINTS)), ids=lambda i: "-".join((POINTS[i][0], *POINTS[i][1][1:])))
def test_conversion_killed_at_a_step_leaves_nothing_loadable(driven, tmp_path, index):
    root, killed = driven
    assert killed[index]
    assert not check_remains(root, index)
    (remains,) = (root / "out").glob(f".{index}.partial-*")
    if POINTS[index] not in COMPLETE:
        # A result that lacks its last file is rejected even under another name.
        with pytest.raises(CheckpointError):
            convert.load(remains.rename(tmp_path / "renamed"))


def check_any_time(root: Path, killed: list[bool], first: int, capsys: pytest.CaptureFixture) -> None:
    complete = [check_remains(root, first + i) for i in range(len(killed))]
    assert all(hit or whole for hit, whole in zip(killed, complete, strict=True))
    with capsys.disabled():
        print(f"\nkilled conversions: {sum(killed)}, of these with a half-written result that loads: 0")
    assert sum(killed) >= len(killed) // 2


def test_conversion_killed_at_any_time_leaves_nothing_loadable(driven, capsys):
    root, killed = driven
    check_any_time(root, killed[len(POINTS) :], len(POINTS), capsys)


@pytest.mark.slow
def test_conversion_killed_at_many_times_leaves_nothing_loadable(tmp_path, capsys):
    check_any_time(tmp_path, drive(tmp_path, at_any_time(200)), 0, capsys)
