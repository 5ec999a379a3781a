# pyright: reportUnknownArgumentType=false
"""Handling of Ctrl-C, which ends the command at once, whatever it is doing.

A Python signal handler runs only when the main thread runs Python again, which can take as long as an XLA compilation.
Ending the process with an exception would destroy objects that XLA's threads still use. Therefore a separate thread
waits for the signal, which C code reports to it, and ends the process immediately.
"""

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator
from typing import NoReturn

from convert import unfinished

STATUS = 128 + signal.SIGINT
_CLEAR_LINE_AND_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"

# The thread that ends the process holds this lock, so that errors caused by the exit are not reported.
ending = threading.Lock()
_listening: list[threading.Event] = []
_last_words: list[str] = []
_restored: list[Callable[[], None]] = []


def end_at_once() -> None:
    """Make SIGINT end this process with status 130. Call it in the main thread, before anything slow.

    The waiting thread needs the interpreter's lock, which XLA releases while it compiles and runs. A full garbage
    collection would hold the lock for a tenth of a second, so full collections are made rare.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # shells ignore the signal for background programs
    reader, writer = socket.socketpair()  # not a pipe, because on Windows only sockets work
    writer.setblocking(False)
    signal.signal(signal.SIGINT, lambda *_: None)  # without a handler, C code reports no signal
    signal.set_wakeup_fd(writer.fileno())
    threading.Thread(target=_wait, args=(reader, writer), daemon=True).start()
    gc.set_threshold(*gc.get_threshold()[:2], 1000)


@contextlib.contextmanager
def heard() -> Generator[threading.Event]:
    """Make Ctrl-C set the event instead of ending the process. The code in the block must poll the event."""
    event = threading.Event()
    _listening.append(event)
    try:
        yield event
    finally:
        _listening.remove(event)


@contextlib.contextmanager
def last_words(text: str) -> Generator[None]:
    """Print `text` to the terminal if Ctrl-C ends the process in this block."""
    _last_words.append(f"{text}\n")
    try:
        yield
    finally:
        _last_words.pop()


@contextlib.contextmanager
def restored(restore: Callable[[], None]) -> Generator[None]:
    """Call `restore` before the process ends, if Ctrl-C ends it in this block."""
    _restored.append(restore)
    try:
        yield
    finally:
        _restored.remove(restore)


def _wait(reader: socket.socket, _writer: socket.socket) -> NoReturn:
    """End the process at the first SIGINT outside every `heard` block. Holding `_writer` keeps it open."""
    while signal.SIGINT not in reader.recv(64) or _listening:  # other numbers are signals that Python handles
        for event in _listening:
            event.set()
    with ending:
        unfinished.delete()
        for restore in _restored:
            restore()
        if os.isatty(2):  # a pipe may be full, or closed
            shown = "".join(_last_words).encode(errors="backslashreplace")
            terminal = os.dup(2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a spinner may still draw a frame
            os.write(terminal, _CLEAR_LINE_AND_SHOW_CURSOR + shown)
        os._exit(STATUS)  # no flush, which could block on a full pipe; typer and rich have flushed
