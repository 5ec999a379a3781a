"""The script for the processes that run llguidance. It imports neither JAX nor jspec.

A server process forks a compiler for each grammar, and a compiler forks a matcher for each output. A grammar that
hangs, fills its memory or overflows the stack therefore ends only its own processes.
"""

import contextlib
import ctypes
import json
import os
import random
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_CPU_SECONDS = 5.0
MEMORY = 512 * 2**20  # bytes, in addition to what a process uses before it compiles anything
_SOON = 0.1  # seconds of compilation, after which other processes take priority
_PROBE_STEPS, _PROBE_SECONDS = 32, 0.1
# CPU seconds: the budget for all of an output's masks, and the amount that each mask adds to it. While masks are
# computed, other rows must wait. A typical mask takes less than a millisecond. The first masks, including a fork, take
# about four milliseconds.
_BURST, _EACH = 0.1, 0.002
_SIZE = struct.Struct("!I")
Mask = TypeVar("Mask", covariant=True)
_Reset: TypeAlias = "Callable[[list[int]], _Matcher[Mask]]"


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


class _Matcher(Protocol[Mask]):  # a `jspec.engine.constraints.Matcher`
    def allowed(self) -> Mask: ...
    def consume(self, token: int) -> bool: ...
    def rollback(self, count: int) -> None: ...


class _Forcing(Protocol):  # a `jspec.engine.constraints.ForcingMatcher`
    def forced(self) -> Sequence[int]: ...


def tree_masks(
    matcher: _Matcher[Mask], drafted: Sequence[int], parents: Sequence[int], vocab_size: int, reset: "_Reset[Mask]"
) -> tuple[list[Mask | bytes | None], list[int]]:
    """Return the masks after the text and after each draft node, and the forced tokens.

    The mask of a node that cannot be reached is None. In a chain, the first tokens that the optional method `forced`
    of the matcher returns replace the draft's tokens, and the draft ends after them. The second list holds each node's
    forced token; -1 for a node without one. The forced tokens must depend only on the tokens before them.

    Args:
        matcher: a `jspec.engine.constraints.Matcher` at the end of the text.
        drafted: the token of each node.
        parents: the parent of each node: 0 for the text and i for node i - 1.
        vocab_size: the vocabulary size. Ids at or above it are not text.
        reset: a function that returns a matcher that has consumed the text and the given draft tokens. It replaces a
            matcher that failed after a draft token, never after the text. A failed node's mask, b"", allows nothing.
    """
    masks: list[Mask | bytes | None] = [None] * (len(drafted) + 1)
    tokens, forced = [*drafted], [-1] * len(drafted)
    may_force = hasattr(matcher, "forced") and [*parents] == [*range(len(drafted))]
    children: list[list[int]] = [[] for _ in masks]
    for node, parent in enumerate(parents, 1):
        children[parent].append(node)

    def force(node: int, path: list[int]) -> None:
        nonlocal matcher, may_force
        try:
            run = [*cast(_Forcing, matcher).forced()][: len(drafted) - node]
        except Exception:  # ignored: masks must not depend on the draft length
            matcher, run = reset(path), []
        if run:
            forced[node : node + len(run)], may_force = run, False
            tokens[node:] = [*run, *[vocab_size] * (len(drafted) - node - len(run))]

    def visit(node: int, path: list[int]) -> None:
        nonlocal matcher
        masks[node] = matcher.allowed()
        if may_force and children[node]:
            force(node, path)
        for child in children[node]:
            token = tokens[child - 1]
            if token >= vocab_size:
                continue
            try:
                if matcher.consume(token):
                    visit(child, [*path, token])
                    matcher.rollback(1)
            except Exception:
                masks[child] = b""
                matcher = reset(path)

    visit(0, [])
    return masks, forced


class DeadEnd(Exception):
    """An error raised if no token may follow, not even EOS."""


class LLGuidance:
    """A `jspec.engine.constraints.Matcher` backed by llguidance."""

    def __init__(self, matcher: "LLMatcher", num_bytes: int):
        self._matcher, self._num_bytes = matcher, num_bytes

    def copy(self) -> "LLGuidance":
        """Return a copy in the same state. The copy and the original share the lexer's results."""
        return LLGuidance(self._matcher.deep_copy(), self._num_bytes)

    def allowed(self) -> bytes:
        """Return the mask of allowed tokens, with one bit for each token.

        Raises:
            DeadEnd: no token may follow.
            RuntimeError: the grammar is too complex.
        """
        bits = self._matcher.compute_bitmask()[: self._num_bytes]
        if self._matcher.is_error():
            error = self._matcher.get_error()
            raise DeadEnd if "NoExtension" in error else RuntimeError(sentence(error))
        if not any(bits):
            raise DeadEnd
        return bits

    def consume(self, token: int) -> bool:
        """Advance by `token`. Return False if the grammar does not allow it here.

        Raises:
            RuntimeError: the grammar is too complex.
        """
        taken = self._matcher.try_consume_tokens([token]) == 1
        if self._matcher.is_error():
            raise RuntimeError(sentence(self._matcher.get_error()))
        return taken

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        self._matcher.rollback(count)

    def forced(self) -> list[int]:
        """Return the usual tokens of the text that must follow, such as the next key of a JSON object.

        Raises:
            RuntimeError: the grammar is too complex.
        """
        tokens = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            raise RuntimeError(sentence(self._matcher.get_error()))
        return tokens


def compile_grammar(tokenizer: "LLTokenizer", kind: str, text: str, num_bytes: int) -> LLGuidance:
    """Compile a grammar, and return a matcher at the start of an output.

    Raises:
        ValueError: llguidance rejects the grammar.
    """
    from llguidance import LLMatcher

    if kind == "schema":
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    else:
        grammar = (LLMatcher.grammar_from_regex if kind == "regular expression" else LLMatcher.grammar_from_lark)(text)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(sentence(matcher.get_error()))
    first = LLGuidance(matcher, num_bytes)
    _probe(first)
    return first


def _probe(first: LLGuidance) -> None:
    """Follow a random output for a while, because some grammars hang or fail only after some tokens.

    Raises:
        ValueError: the first mask cannot be computed.
    """
    rng, matcher, begun = random.Random(0), first.copy(), time.monotonic()
    try:
        bits = matcher.allowed()
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    except DeadEnd:
        raise ValueError("no text satisfies it") from None
    with contextlib.suppress(RuntimeError, DeadEnd):  # later failures affect only the outputs that reach them
        for _ in range(_PROBE_STEPS):
            tokens = [8 * i + bit for i, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1]
            if time.monotonic() > begun + _PROBE_SECONDS or not matcher.consume(rng.choice(tokens)):
                return
            bits = matcher.allowed()


def sentence(error: str) -> str:
    """Return llguidance's message without its parser state. For a panic, say only that it occurred."""
    message = " ".join(re.split("<(?:state|backtrace)>", error)[0].split())
    return "llguidance fails on it" if "panic: " in message else message


def make_tokenizer(text: str, vocab_size: int, eos_ids: Sequence[int]) -> "LLTokenizer":
    """Return an llguidance tokenizer made from the contents of a tokenizer.json file.

    Raises:
        ValueError: the tokenizer has more tokens than `vocab_size`.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))


def _main(control: socket.socket) -> None:
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


if __name__ == "__main__":
    _main(socket.socket(fileno=int(sys.argv[1])))
