"""The processes that run llguidance. They import neither JAX nor the other parts of jspec.

A server process forks a compiler for each grammar, and a compiler forks a matcher for each output. A grammar that
hangs, fills its memory or overflows the stack therefore ends only its own processes.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from jspec.engine.grammar_matcher import DeadEnd, LLGuidance, compile_grammar, make_tokenizer, tree_masks

if TYPE_CHECKING:
    from llguidance import LLTokenizer

COMPILE_CPU_SECONDS = 5.0
MEMORY = 512 * 2**20  # bytes, in addition to what a process uses before it compiles anything
_SOON = 0.1  # seconds of compilation, after which other processes take priority
# CPU seconds: the budget for all of an output's masks, and the amount that each mask adds to it. While masks are
# computed, other rows must wait. A typical mask takes less than a millisecond. The first masks, including a fork, take
# about four milliseconds.
_BURST, _EACH = 0.1, 0.002
_SIZE = struct.Struct("!I")


def send(connection: socket.socket, message: bytes) -> None:
    """Send one message."""
    connection.sendall(_SIZE.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message, or None if the other end is closed."""
    header = _receive_bytes(connection, _SIZE.size)
    return None if header is None else _receive_bytes(connection, _SIZE.unpack(header)[0])


def _receive_bytes(connection: socket.socket, count: int) -> bytes | None:
    data, view = bytearray(count), 0
    while view < count:
        got = connection.recv_into(memoryview(data)[view:])
        if not got:
            return None
        view += got
    return bytes(data)


def main(control: socket.socket) -> None:
    """Read the tokenizer, then fork a compiler for each socket that arrives."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # a supervisor sends them to all processes of a
        signal.signal(number, signal.SIG_IGN)  # service; this one ends with its parent, which may have to finish first
    message = receive(control)
    if message is None:
        return
    text, vocab_size, eos_ids = json.loads(message)
    try:
        tokenizer = make_tokenizer(text, vocab_size, eos_ids)
    except Exception as error:
        return send(control, str(error).encode())
    send(control, b"")
    _fork_for_each(control, lambda connection: _serve_compiler(connection, tokenizer, vocab_size))


def _fork_for_each(control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Fork a child for each socket that arrives on `control`, until the other end of `control` is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the parent does not wait for children
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        parent = os.getpid()
        if not descriptors:  # this process cannot open more files
            continue
        with socket.socket(fileno=descriptors[0]) as connection:
            if _fork() == 0:
                try:
                    control.close()
                    _end_with(parent)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    serve(connection)
                finally:
                    os._exit(0)


def _fork() -> int | None:
    """Return the child's process id, 0 in the child, or None if the system cannot start another process."""
    with contextlib.suppress(OSError):
        return os.fork()
    return None  # the other end sees the connection close without an answer


def _end_with(parent: int) -> None:
    """End this process when its parent ends. On Linux, this works even in the middle of a computation."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _serve_compiler(connection: socket.socket, tokenizer: "LLTokenizer", vocab_size: int) -> None:
    """Compile one grammar, answer with an error or b"", and fork a matcher for each socket that arrives."""
    message = receive(connection)
    if message is None:
        return
    _limit_memory()
    send(connection, str(os.getpid()).encode())
    signal.setitimer(signal.ITIMER_PROF, COMPILE_CPU_SECONDS)  # SIGPROF ends the process
    kind, text = json.loads(message)
    compiled = _behind_others(lambda: compile_grammar(tokenizer, kind, text, 4 * -(-vocab_size // 32)))
    signal.setitimer(signal.ITIMER_PROF, 0)
    if isinstance(compiled, Exception):
        return send(connection, str(compiled).encode() or b"it fails")
    send(connection, b"")
    _fork_for_each(connection, lambda matcher: _serve_matcher(matcher, compiled, vocab_size))


def _limit_memory() -> None:
    import resource

    pages = 0
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    if pages:  # on other systems the limit counts reserved memory, not used memory
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _behind_others(compute: Callable[[], LLGuidance]) -> LLGuidance | Exception:
    """Return the result of `compute`, or its exception. If it takes long, lower its priority to the minimum.

    The priority is set for a thread, because a process cannot raise its own priority again.
    """
    results: list[LLGuidance | Exception] = []

    def run() -> None:
        try:
            results.append(compute())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(_SOON)
    if thread.is_alive() and sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, 19)
    thread.join()
    return results[0]


def _serve_matcher(connection: socket.socket, first: LLGuidance, vocab_size: int) -> None:
    """Answer requests for masks until the other end is closed. SIGPROF ends the process if the masks take too long."""
    text: list[int] = []
    matcher, left = first.copy(), _BURST
    send(connection, str(os.getpid()).encode())

    def reset(path: Sequence[int]) -> LLGuidance:
        nonlocal matcher
        matcher = first.copy()
        if not all(map(matcher.consume, [*text, *path])):
            raise RuntimeError("the grammar rejected a token that it had allowed")
        return matcher

    while (message := receive(connection)) is not None:
        new, drafted, parents = json.loads(message)
        left = min(_BURST, left + _EACH * (1 + len(drafted)))
        signal.setitimer(signal.ITIMER_PROF, left)
        begun = time.process_time()
        try:
            for token in new:
                if not matcher.consume(token):
                    raise RuntimeError("the grammar rejected a token that it had allowed")
            text += new
            masks, forced = tree_masks(matcher, drafted, parents, vocab_size, reset)
            answer = b"+" + b"".join(_mask_bytes(mask, len(cast(bytes, masks[0]))) for mask in masks)
            answer += struct.pack(f"={len(forced)}i", *forced)
        except DeadEnd:
            answer = b"+"
        except Exception as error:
            answer = b"-" + str(error).encode()
        left = max(0.0, left - (time.process_time() - begun))  # the timer may be late
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(connection, answer)


def _mask_bytes(mask: bytes | None, size: int) -> bytes:
    """Return a node's mask with `size` bytes. Allow all tokens at an unreachable node, and none at a failed one."""
    return b"\xff" * size if mask is None else mask or bytes(size)
