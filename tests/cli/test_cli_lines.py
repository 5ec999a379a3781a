"""Lines of any length are read from a terminal, which is restored afterwards."""

import os
import pty
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest

from jspec.cli import interrupts
from jspec.cli import line_input as lines
from jspec.cli.common import UsageError

# A conversation with a partner that echoes each message.
TALK = """
import os, sys, time
from jspec.cli import chat, interrupts
from jspec.cli import line_input as lines
interrupts.end_at_once()
def show(message):
    print("GOT", len(message), message[:3] + message[-3:], sum(map(ord, message)), flush=True)
    time.sleep(0.3)
chat._show = show
class Somebody:
    answer = staticmethod(lambda message: message)
with lines.whole_lines():
    chat._talk(Somebody)
print("ENDED", flush=True)
"""


class Terminal:
    """A process on a terminal, whose output is read as it arrives.

    Args:
        redirected: whether its standard output is a file.
    """

    def __init__(self, folder, redirected=False):
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(self.ours)
        self._file, self._shown = folder / "output", b""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
        with open(self._file, "wb") as file:
            environment = os.environ | {"TERM": "xterm", "PYTHONPATH": os.getcwd(), "LC_ALL": "C.UTF-8"}
            self.process = subprocess.Popen(
                [sys.executable, "-c", TALK],
                env=environment,
                stdin=theirs,
                stderr=theirs,
                stdout=file if redirected else theirs,
            )
        self._redirected, self._theirs = redirected, theirs
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        try:
            while chunk := os.read(self.ours, 65536):
                self._shown += chunk
        except OSError:
            pass

    @property
    def shown(self):
        """The text on the terminal so far."""
        return self._shown

    @property
    def said(self):
        """The answers so far, as complete lines."""
        out = self._file.read_bytes() if self._redirected else self._shown
        return [
            line.strip()
            for line in out.decode(errors="replace").splitlines(keepends=True)
            if line[:3] == "GOT" and line[-1] == "\n"
        ]

    def type(self, text):
        """Send these characters, as a keyboard or a paste does."""
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self.ours, data[:1024]) :]

    def until(self, true):
        """Wait until `true()` holds."""
        end = time.monotonic() + 120
        while not true():
            assert time.monotonic() < end and self.process.poll() is None, self._shown[-2000:]
            time.sleep(0.02)

    def close(self):
        """End the process and the reading thread, because the next terminal may have the same descriptor."""
        self.process.kill()
        self.process.wait()
        os.close(self._theirs)
        self._reader.join()
        os.close(self.ours)


@pytest.fixture(params=[False, True], ids=["terminal", "redirected"])
def terminal(request, tmp_path):
    opened = Terminal(tmp_path, request.param)
    opened.until(lambda: b"> " in opened.shown)
    yield opened
    opened.close()


def answer(message):
    return f"GOT {len(message)} {message[:3] + message[-3:]} {sum(map(ord, message))}"


@pytest.mark.parametrize("count", [1, 1023, 1024, 4094, 4095, 4096, 4097, 6000, 100_000])
def test_long_line_is_read_whole(terminal, count):
    message = ("abcdefghij klm" * count)[: count - 1] + "z"
    terminal.type(f"{message}\n")
    terminal.until(lambda: terminal.said)
    assert terminal.said == [answer(message)]


@pytest.mark.parametrize("count", [2047, 2048, 5000])
def test_multibyte_characters_are_read_whole(terminal, count):
    message = "ü漢😀" * count
    terminal.type(f"{message}\n")
    terminal.until(lambda: terminal.said)
    assert terminal.said == [answer(message)]


def test_lines_typed_during_answer_are_read_whole(terminal):
    messages = ["a" * 6000, "b" * 5000, "", "c" * 4096]
    threading.Thread(target=terminal.type, args=("".join(f"{message}\n" for message in messages),), daemon=True).start()
    terminal.until(lambda: len(terminal.said) == 3)
    assert terminal.said == [answer(message) for message in messages if message]


def test_pasted_lines_form_one_message(terminal):
    """Terminals mark pasted text, so its line ends are part of the message."""
    terminal.type("\x1b[200~one\ntwo\x1b[201~\n")
    terminal.until(lambda: terminal.said)
    assert terminal.said[0].startswith("GOT 7 one")


def test_lines_can_be_edited_and_recalled(terminal):
    terminal.type("wrong\x15right\x7f\x7fht\n")  # Ctrl-U, backspace
    terminal.until(lambda: len(terminal.said) == 1)
    terminal.type("\x1b[A!\n")  # the previous line
    terminal.until(lambda: len(terminal.said) == 2)
    assert terminal.said == [answer("right"), answer("right!")]


@pytest.mark.parametrize("end", ["Ctrl-D", "Ctrl-C"])
def test_terminal_is_restored(terminal, end):
    terminal.type("a\n")
    terminal.until(lambda: terminal.said and terminal.shown.count(b"> ") >= 2)
    time.sleep(0.5)
    terminal.type("\x04") if end == "Ctrl-D" else terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(60) == (0 if end == "Ctrl-D" else interrupts.STATUS)
    assert termios.tcgetattr(terminal.ours) == terminal.before


def test_truncated_line_is_an_error_without_line_editing(monkeypatch):
    monkeypatch.setattr(lines, "_edits", lambda: False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for count, is_cut in ((4094, False), (4095, True)):
        monkeypatch.setattr(sys.stdin, "readline", lambda count=count: "x" * count + "\n", raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        if is_cut:
            with pytest.raises(UsageError, match="the end of this line may be missing"):
                lines.read("> ")
        else:
            assert len(lines.read("> ")) == count + 1
