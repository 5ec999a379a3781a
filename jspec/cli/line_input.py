# pyright: reportUnusedImport=false
"""Read lines of any length from a terminal."""

import contextlib
import os
import sys
from collections.abc import Generator
from importlib.util import find_spec

import typer

from jspec.cli import interrupts
from jspec.cli.common import UsageError

_LONGEST = {"linux": 4096, "darwin": 1024}  # bytes that a terminal buffers per line, including its end
_NO_BRACKETS = b"\x1b[?2004l"  # turns off the terminal's bracketed paste


@contextlib.contextmanager
def whole_lines() -> Generator[None]:
    """Make the terminal pass on text as it is typed, and restore the terminal afterwards, even after Ctrl-C.

    A terminal that buffers lines drops everything beyond 4,096 bytes of a line before the program can read it.
    """
    if not _edits():
        yield
        return
    import readline  # noqa: F401, gives `input` editing, a history and lines of any length
    import termios

    before, changed = termios.tcgetattr(0), termios.tcgetattr(0)
    changed[3] &= ~termios.ICANON
    changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0

    def restore() -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            termios.tcsetattr(0, termios.TCSANOW, before)
            os.write(0, _NO_BRACKETS)

    with interrupts.restored(restore):
        termios.tcsetattr(0, termios.TCSANOW, changed)
        try:
            yield
        finally:
            restore()


def read(prompt: str) -> str:
    """Return the next line with its newline, or an empty string at the end of the input. Show `prompt` on a terminal.

    Raises:
        UsageError: the terminal may have truncated the line.
        UnicodeDecodeError: the line is not UTF-8.
    """
    if _edits():
        try:
            with _output_on_the_terminal():
                return f"{input(prompt)}\n"
        except EOFError:
            return ""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        typer.echo(prompt, nl=False, err=True)
    line = sys.stdin.readline()
    longest = _LONGEST.get(sys.platform)
    if is_terminal and longest and len(line.encode(errors="replace")) >= longest:
        raise UsageError(
            f"The terminal passes on at most {longest - 2} bytes per line, so the end of this line may be "
            "missing; send it through a pipe."
        )
    return line


def _edits() -> bool:
    """Return whether `input` can edit lines here."""
    try:
        if sys.stdin.fileno() != 0 or sys.stdout.fileno() != 1:
            return False
    except OSError:
        return False
    return bool(find_spec("readline")) and os.isatty(0) and (os.isatty(1) or os.isatty(2))


@contextlib.contextmanager
def _output_on_the_terminal() -> Generator[None]:
    """Make `input` write to standard error if standard output is not a terminal.

    The function `input` edits lines only on a terminal.
    """
    if os.isatty(1):
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)
