"""The GPU drill's driver: the files it leaves after steps fail or it is killed. The steps are made up."""

import dataclasses
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import summary
from bench.gpu.drill import Drill
from bench.gpu.record import Record
from bench.gpu.steps import STEPS, Step, choose
from support.places import ROOT

MODULES = {
    "fine": "record.add('answer', figure=42, rehearse=rehearse)",
    "broken": "record.add('first', figure=1); raise ValueError('no such device')",
    "partly": "\n  with record.attempt('bad'): raise KeyError('x')\n  record.add('good', ok=True)",
    "dies": "record.add('first', figure=1); print('last words'); os.kill(os.getpid(), 11)",
    "waits": "record.add('first', figure=1); time.sleep(600)",
    "hangs": "record.add('first', figure=1); subprocess.Popen(['bash', '-c', f'sleep 600; : {record.file}']);"
    " time.sleep(600)",
}


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Return ``steps(*names)``, which gives steps whose modules are in `MODULES`; "absent" has no module."""
    for name, body in MODULES.items():
        code = f"import os, subprocess, time\nfrom pathlib import Path\ndef run(record, rehearse):\n  {body}\n"
        (tmp_path / f"step_{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return lambda *names: tuple(Step(name, f"step_{name}", 1.0) for name in names)


def _read(folder):
    return {file.stem: json.loads(file.read_text()) for file in Path(folder).glob("*.json")}


def test_failed_steps_keep_rows_and_next_step_runs(steps, tmp_path, capfd):
    chosen = steps("broken", "absent", "dies", "partly", "fine")
    drill = Drill(tmp_path / "out", 500, True, chosen)
    drill.run()
    files = _read(tmp_path / "out")
    states = {"broken": "failed", "absent": "failed", "dies": "crashed (signal 11)", "partly": "done", "fine": "done"}
    assert {entry["step"]: entry["state"] for entry in files["drill"]["steps"]} == states
    assert list(files) and sorted(files) == ["01-broken", "02-absent", "03-dies", "04-partly", "05-fine", "drill"]
    assert {name: files[name]["state"] for name in files if name != "drill"} == {
        f"{i:02}-{name}": state for i, (name, state) in enumerate(states.items(), 1)
    }
    assert [row["what"] for row in files["01-broken"]["rows"]] == ["first", "step_broken"]
    assert files["01-broken"]["rows"][1]["error"] == "ValueError: no such device"
    assert "No module named 'step_absent'" in files["02-absent"]["rows"][0]["error"]
    assert files["03-dies"]["rows"][0]["figure"] == 1 and "last words" in files["03-dies"]["output"]
    assert files["05-fine"]["rows"][0] | {"at": 0} == {"what": "answer", "figure": 42, "rehearse": True, "at": 0}
    assert files["drill"]["state"] == "done" and files["drill"]["conditions"]["platform"] == "cpu"
    assert [entry["errors"] for entry in files["drill"]["steps"]] == [1, 1, 0, 1, 0]
    assert "FAILED step_broken: error ValueError: no such device" in capfd.readouterr().out


def test_hanging_step_is_killed_with_its_subprocesses(steps, tmp_path):
    """A step that hangs leaves the other steps their time."""
    hangs, fine = steps("hangs", "fine")
    Drill(tmp_path / "out", 168, True, [hangs, dataclasses.replace(fine, share=20.0)]).run()
    files = _read(tmp_path / "out")
    hangs, fine = files["drill"]["steps"]
    assert hangs["state"] == files["01-hangs"]["state"] == "timed out" and fine["state"] == "done"
    assert hangs["limit"] == pytest.approx(8, abs=0.1) and 120 < fine["limit"] < 160.1
    assert not _running(str(tmp_path / "out"))


def _running(text):
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line for line in lines if text.encode() in line]


def test_killed_drill_leaves_complete_files_and_no_process(steps, tmp_path):
    steps("fine", "waits")
    code = (
        "import sys; from pathlib import Path; from bench.gpu.drill import Drill; from bench.gpu.steps import Step\n"
        "Drill(Path(sys.argv[1]), 500, True, [Step(n, 'step_' + n, 1.0) for n in ('fine', 'waits')]).run()"
    )
    out = tmp_path / "out"
    driver = subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.DEVNULL)
    try:
        _wait(lambda: (out / "02-waits.json").exists() and _read(out)["02-waits"]["rows"])
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    files = _read(out)
    assert files["01-fine"]["state"] == "done" and files["01-fine"]["rows"][0]["figure"] == 42
    assert files["02-waits"]["state"] == "running" and files["02-waits"]["rows"][0]["figure"] == 1
    assert [entry["state"] for entry in files["drill"]["steps"]] == ["done", "running"]
    _wait(lambda: not _running(str(out)))


def _wait(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_record_file_is_complete_at_any_moment(tmp_path):
    """A reader that polls constantly never sees a partial file."""
    record = Record(tmp_path / "step.json")
    writer = threading.Thread(target=lambda: [record.add("row", text="x" * 1000) for _ in range(200)])
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(len(_read(tmp_path)["step"]["rows"]))
    writer.join()
    assert len(set(seen)) > 3 and seen == sorted(seen)


def test_values_unknown_to_json_are_converted(tmp_path):
    record = Record(tmp_path / "step.json")
    record.add("row", single=np.float32(0.5), count=np.int64(3), path=tmp_path, set={1})
    row = _read(tmp_path)["step"]["rows"][0]
    assert (row["single"], row["count"], row["path"], row["set"]) == (0.5, 3, str(tmp_path), "{1}")


def test_summary_fits_in_terminal_output(tmp_path):
    """Wrong results come first, for any number of correct rows."""
    entries = []
    for step in STEPS:
        record = Record(tmp_path / f"{step.name}.json")
        for i in range(100):
            record.add(f"a measurement with a long name, number {i}", figure=i / 7, text="x" * 300, ok=i != 90)
        entries.append({"step": step.name, "file": f"{step.name}.json", "state": "done", "seconds": 1.0})
    text = summary.text(tmp_path, {"steps": entries})
    assert len(text) < 12_000 and text.count("FAILED a measurement with a long name, number 90") == len(STEPS)


def test_step_names_are_unique_and_shares_total_540_seconds():
    assert len({step.name for step in STEPS}) == len({step.module for step in STEPS}) == len(STEPS)
    assert sum(step.share for step in choose(STEPS, (), rehearse=False)) == 540


def test_on_request_steps_run_if_named_or_rehearsed():
    steps = Step("usual", "a", 1.0), Step("rare", "b", 1.0, on_request=True)
    names = {
        (only, rehearse): [step.name for step in choose(steps, only, rehearse)]
        for only in ((), ("rare",), ("usual",))
        for rehearse in (False, True)
    }
    assert names == {((), False): ["usual"], ((), True): ["usual", "rare"]} | {
        ((name,), rehearse): [name] for name in ("rare", "usual") for rehearse in (False, True)
    }
