"""Ctrl-C ends the command at once, whatever it is doing.

A handler in Python waits until the main thread runs Python again, which takes as long as XLA compiles; and to end by an
exception pulls down what XLA's threads still work with. So a thread waits for the signal, which C code reports to it,
and ends the process where it stands.
"""

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from convert import unfinished

STATUS = 128 + signal.SIGINT
_CLEAR_LINE_AND_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"

# Held by whoever ends the process: what an end breaks must not be reported as a failure on the way.
ending = threading.Lock()
_listening: list[threading.Event] = []
_last_words: list[str] = []
_restored: list[Callable[[], None]] = []


def end_at_once() -> None:
    """From now on SIGINT ends this process with status 130; for the main thread, before anything slow.

    The thread needs the interpreter's lock, which XLA releases while it compiles and runs. A collection of all garbage
    would keep it for a tenth of a second, so there is one seldom.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return  # as a shell asks of what runs in its background
    reader, writer = socket.socketpair()  # not a pipe: on Windows only this works
    writer.setblocking(False)
    signal.signal(signal.SIGINT, lambda *_: None)  # without a handler nothing is reported
    signal.set_wakeup_fd(writer.fileno())
    threading.Thread(target=_wait, args=(reader, writer), daemon=True).start()
    gc.set_threshold(*gc.get_threshold()[:2], 1000)


@contextlib.contextmanager
def heard() -> Iterator[threading.Event]:
    """In this block Ctrl-C sets the event, and ends nothing: whoever is at work looks at it."""
    event = threading.Event()
    _listening.append(event)
    try:
        yield event
    finally:
        _listening.remove(event)


@contextlib.contextmanager
def last_words(text: str) -> Iterator[None]:
    """In this block Ctrl-C ends the process with this sentence, on a terminal."""
    _last_words.append(f"{text}\n")
    try:
        yield
    finally:
        _last_words.pop()


@contextlib.contextmanager
def restored(restore: Callable[[], None]) -> Iterator[None]:
    """In this block Ctrl-C calls `restore` before it ends the process."""
    _restored.append(restore)
    try:
        yield
    finally:
        _restored.remove(restore)


def _wait(reader: socket.socket, _writer: socket.socket) -> NoReturn:
    """End the process at the first SIGINT that nobody has listened for; the writer is kept open by being here."""
    while signal.SIGINT not in reader.recv(64) or _listening:  # others are signals that Python handles
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
        os._exit(STATUS)  # what was printed is out: typer and rich flush, and a flush here could wait for a full pipe
