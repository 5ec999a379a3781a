"""Compiled grammars, each running in its own processes with time and memory limits (see `grammar_worker`)."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jspec.engine import grammar_worker as worker
from jspec.engine.constraints import ConstraintError, DraftMasks, MaskSource

_COMPILE_SECONDS, _MASK_SECONDS, _START_SECONDS = 10.0, 5.0, 120.0  # wall-clock time; the worker limits CPU time
# The packages are imported without their __init__ files, which would import JAX.
_SCRIPT = """
import socket, sys, types
for name, folder in zip(("jspec", "jspec.engine"), sys.argv[1:3]):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from jspec.engine.grammar_worker import main
main(socket.socket(fileno=int(sys.argv[3])))
"""
_PACKAGES = [str(folder) for folder in (Path(__file__).parents[1], Path(__file__).parent)]
_NO_PROCESS = "No process for a grammar can be started now; try again later."


class GrammarPool:
    """A pool of processes that compile and evaluate grammars.

    Args:
        tokenizer: the contents of a tokenizer.json file.
        vocab_size: the vocabulary size V.
        eos_ids: the tokens that may end an output.

    Raises:
        ValueError: llguidance rejects the tokenizer.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]):
        self._setup = json.dumps([tokenizer, vocab_size, [*eos_ids]]).encode()
        self._size = -(-vocab_size // 32)
        self._lock, self._is_closed = threading.Lock(), False
        self._server = _Server(self._setup)

    def compile(self, kind: str, text: str) -> "CompiledGrammar":
        """Compile `text`, waiting up to ten seconds. `kind` is "schema", "regular expression" or "grammar".

        Raises:
            ValueError: llguidance rejects the grammar, or compilation takes too much time or memory.
            RuntimeError: the pool is closed, or no process can be started.
        """
        connection, server = self._connect()
        answer = None
        try:
            answer = _conversation(connection, json.dumps([kind, text]).encode())
        finally:
            if answer != b"":
                connection.close()
        if answer == b"":
            return CompiledGrammar(connection, self._size, server, (kind, text))
        if answer is None:
            raise ValueError(
                f"it takes more than {worker.COMPILE_CPU_SECONDS:g} seconds or "
                f"{worker.MEMORY >> 20} MiB of memory to compile; simplify it"
            )
        raise ValueError(answer.decode())

    def _connect(self) -> tuple[socket.socket, "_Server"]:
        """Return a connection to a new compiler process, and the server. Restart the server if it has ended.

        Raises:
            RuntimeError: the pool is closed, or the system cannot create a process or a socket.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The Grammars object is closed; create a new one.")
            try:
                if not self._server.is_alive:
                    self._server.close()
                    self._server = _Server(self._setup)
                return _connect(self._server.control), self._server
            except (ValueError, OSError) as error:
                raise RuntimeError(_NO_PROCESS) from error

    def close(self) -> None:
        """End all processes immediately. Constraints that are still in use fail."""
        with self._lock:
            self._is_closed = True
            self._server.close()


class _Server:
    """The server process, which forks compiler processes. It computes nothing itself, so it never hangs."""

    def __init__(self, setup: bytes):
        self.control, theirs = socket.socketpair()
        with theirs:
            # The server has its own session, so that only the parent receives Ctrl-C. The server ends with the parent.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _SCRIPT, *_PACKAGES, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.close = weakref.finalize(self, _end_server, self.control, self._process)
        self.control.settimeout(_START_SECONDS)
        try:
            worker.send(self.control, setup)
            answer = worker.receive(self.control)
        except OSError as error:
            answer = f"the grammar process did not start: {error}".encode()
        if answer != b"":
            self.close()
            raise ValueError("the grammar process has ended" if answer is None else answer.decode())

    @property
    def is_alive(self) -> bool:
        """Whether the server is running and can fork."""
        return self._process.poll() is None


def _end_server(control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    control.close()
    process.kill()  # its children end with it
    process.wait()


def _connect(control: socket.socket) -> socket.socket:
    """Return a connection to a process that the server forks for this connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(control, [b"."], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


def _conversation(connection: socket.socket, question: bytes) -> bytes | None:
    """Send a compile request. Return the compiler's answer, or None if the compiler has ended or takes too long.

    Raises:
        RuntimeError: the compiler did not start.
    """
    process, end = None, time.monotonic() + _COMPILE_SECONDS
    connection.settimeout(_COMPILE_SECONDS)
    try:
        worker.send(connection, question)
        process = worker.receive(connection)
        connection.settimeout(max(0.01, end - time.monotonic()))
        if process is not None:
            return worker.receive(connection)
    except TimeoutError:
        _kill(process)
    except OSError:  # the compiler ended before it had read the whole request
        pass
    if process is None:
        raise RuntimeError(_NO_PROCESS)
    return None


def _kill(process: bytes | None) -> None:
    """Kill a process. It must still hold its end of a connection, so that its process id is valid."""
    if process:
        with contextlib.suppress(OSError):
            os.kill(int(process), signal.SIGKILL)


class CompiledGrammar:
    """A factory that creates one mask source for each output. Each source has its own process.

    After the grammar is closed or garbage collected, its processes end when its last source is closed.

    Attributes:
        source: the kind and the text that were compiled.
    """

    def __init__(self, connection: socket.socket, size: int, server: _Server, source: tuple[str, str]):
        self._connection, self._size, self.source = connection, size, source
        self._server = server  # the server ends when no reference to it remains
        self._lock, self._sources, self._is_closed = threading.Lock(), 0, False
        self._end = weakref.finalize(self, connection.close)

    def __call__(self) -> "GrammarMasks":
        """Return a mask source for a new output.

        Raises:
            RuntimeError: the grammar is closed, or its process has ended.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the grammar is closed")
            try:
                connection = _connect(self._connection)
            except OSError:
                raise RuntimeError("the grammar's process has ended") from None
            self._sources += 1
        return GrammarMasks(connection, self, self._size)

    @property
    def is_alive(self) -> bool:
        """Whether the server is running. The grammar's processes end when the server ends."""
        return self._server.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether the grammar can still create sources."""
        with self._lock:
            if self._is_closed or not self.is_alive:
                return False
            ended = select.poll()  # the process sends nothing, so its connection is readable only after it has ended
            ended.register(self._connection, select.POLLIN)
            return not ended.poll(0)

    def close(self) -> None:
        """Stop creating sources. The process ends when the last existing source is closed."""
        with self._lock:
            self._is_closed = True
            if not self._sources:
                self._end()

    def release_source(self) -> None:
        """Decrement the number of sources."""
        with self._lock:
            self._sources -= 1
            if self._is_closed and not self._sources:
                self._end()


class GrammarMasks(MaskSource):
    """A mask source for one output, with its own process."""

    def __init__(self, connection: socket.socket, grammar: CompiledGrammar, size: int):
        self._connection, self._grammar, self._size = connection, grammar, size
        self._process: bytes | None = None
        self._num_sent, self._count, self._is_open = 0, 0, True
        connection.settimeout(_MASK_SECONDS)
        weakref.finalize(self, connection.close)
        self._send((), (), ())  # the process starts and computes its slow first mask while the prompt is prefilled

    def ask(self, text: Sequence[int], drafted: Sequence[int], parents: Sequence[int]) -> None:
        new, self._num_sent, self._count = text[self._num_sent :], len(text), len(drafted) + 1
        self._send(new, drafted, parents)

    def _send(self, new: Sequence[int], drafted: Sequence[int], parents: Sequence[int]) -> None:
        with contextlib.suppress(OSError):  # the process has ended, which `masks` reports
            worker.send(self._connection, json.dumps([[*new], [*drafted], [*parents]]).encode())

    def masks(self) -> DraftMasks:
        answer = self._answer()
        if answer is None and not (self._process and self._grammar.is_alive):
            raise ConstraintError(
                "The constraint's process could not be started, or has ended; send the request again.",
                "constraint_failed",
            )
        if answer is None:
            raise ConstraintError(
                f"The constraint takes too much time or memory after {self._num_sent} tokens; simplify it.",
                "constraint_too_complex",
            )
        if answer[:1] == b"-":
            raise ConstraintError(
                f"The constraint failed after {self._num_sent} tokens ({answer[1:].decode()}); simplify it.",
                "constraint_too_complex",
            )
        if len(answer) == 1:
            return DraftMasks.dead_end(self._count, self._size)
        words = np.frombuffer(answer, np.uint32, offset=1)
        masks, forced = np.split(words, [self._count * self._size])
        return DraftMasks(masks.reshape(self._count, self._size), forced.view(np.int32))

    def _answer(self) -> bytes | None:
        """Return the process's answer, or None if the process has ended or takes too long."""
        try:
            if self._process is None:
                self._process = worker.receive(self._connection)
                if not self._process or worker.receive(self._connection) is None:  # the first mask, asked for early
                    return None
            return worker.receive(self._connection)
        except TimeoutError:
            _kill(self._process)
        except OSError:  # the compiler has ended
            pass
        return None

    def close(self) -> None:
        """End the process. A call that is still waiting for an answer gets none."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # not closed, because another thread may be reading
            self._grammar.release_source()
