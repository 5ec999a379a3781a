"""Ctrl-C ends the command with status 130 and no other message, at any point."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import threading
import time

import pytest

from convert import unfinished
from jspec.cli import app, interrupts
from support import checkpoints

# A command whose main thread is blocked in C code with a file half written.
WRITING = """
import ctypes, sys
from convert import to_hf
from jspec.cli import main

def write(folder, *_):
    (folder / "model.safetensors").write_bytes(b"half")
    print("writing", flush=True)
    while True:  # the signal cuts it short
        ctypes.CDLL(None).sleep(600)

to_hf.write = write
main()
"""


def interrupted(command, moment, folder, later=0.0):
    """Return status and output of `command` on a terminal; send SIGINT `later` seconds after `moment` is shown."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "XDG_CACHE_HOME": str(folder.parent / "cache")}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    # A shell's background processes, and all that they start, ignore SIGINT. Because it is handled here, a new program
    # has the default instead, as on a terminal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    deaf = threading.Timer(120, process.kill)
    deaf.start()
    shown = b""
    try:
        while moment not in shown:
            shown += os.read(ours, 4096)  # fails if the process has ended
        time.sleep(later)
        process.send_signal(signal.SIGINT)
        while chunk := _read(ours):
            shown += chunk
        return process.wait(), shown.decode()
    finally:
        deaf.cancel()
        process.kill()
        process.wait()
        os.close(ours)


def _read(terminal):
    """Return the terminal's next output, or nothing once it has no writers, which Linux reports as an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize(("moment", "later"), [(b"Importing", 0.0), (b"Compiling", 2.0)])  # XLA follows tracing
def test_interrupted_generate_exits_with_status_130(tmp_path, moment, later):
    status, shown = interrupted(["-m", "jspec", "generate", "x"], moment, tmp_path, later)
    assert status == 130 and shown.endswith("\x1b[?25h")  # which shows the cursor
    assert not any(word in shown for word in ("Traceback", "Interrupt", "Fatal", "jspec: ")), shown


def test_interrupted_training_says_how_to_resume(tmp_path):
    (tmp_path / "data.txt").write_text("def add(a, b):\n    return a + b\n" * 200)
    command = ["-m", "jspec", "train", "--output", "run", "--data", "data.txt", "--steps", "9999"]
    status, shown = interrupted(command, b"Starting", tmp_path, 1.0)
    assert status == 130 and shown.endswith("Stopped. The same command resumes from run.\r\n"), shown


def test_interrupted_conversion_leaves_no_partial_output(tmp_path):
    checkpoints.make(tmp_path / "hf")
    command = ["-c", WRITING, "convert", "hf", "out", "--to", "hf"]
    status, shown = interrupted(command, b"writing", tmp_path)
    assert status == 130 and "out" not in shown, shown
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"]


def test_renamed_folder_is_not_deleted(tmp_path):
    with unfinished.deleted_in_the_end(tmp_path / "new"):
        (tmp_path / "new").mkdir()
        (tmp_path / "new").rename(tmp_path / "done")
    with unfinished.deleted_in_the_end(tmp_path / "other"):
        (tmp_path / "other").mkdir()
        unfinished.delete()
        assert [folder.name for folder in tmp_path.iterdir()] == ["done"]


def test_failure_during_exit_is_not_reported():
    """The main thread waits instead of reporting that a file is missing, because the end may have deleted it."""

    def fail():
        with contextlib.suppress(SystemExit):
            app.run(["generate", "--no"])

    ran = threading.Thread(target=fail, daemon=True)
    with interrupts.ending:
        ran.start()
        ran.join(0.5)
        assert ran.is_alive()
    ran.join(60)
    assert not ran.is_alive()
