"""Response formats that hang, crash or overload the grammar library end only their own requests."""

import json
import os
import signal
import socket
import threading
import time

import httpx
import numpy as np
import pytest

from jspec.engine import grammar_pool, grammar_worker
from jspec.engine.constraints import ConstraintError
from support.streams import LONG, SEEDED, asking, connected, post, texts_of, until

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="without processes there are no limits"),
]
NUMBER = {"type": "integer"}
DEAD_END = {"type": "object", "properties": {"a": NUMBER}, "patternProperties": {"^a$": NUMBER}}
DEAD_END |= {"required": ["a"], "additionalProperties": False}


def chain(count):
    """Return a schema with a chain of `count` references ($ref)."""
    link = lambda i: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i}"}}, "required": ["x"]}  # noqa: E731
    definitions = {f"d{i}": link(i + 1) for i in range(count)} | {f"d{count}": {"type": "integer"}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


HOSTILE = {
    "a chain of references": (chain(1000), "1001 different $ref"),
    "a shorter chain": (chain(200), "201 references in one chain of $ref; expected at most 100"),
    "a large multiple": ({"type": "integer", "multipleOf": 9999991}, "multiples of 9999991 (multipleOf)"),
    "multiples": ({"allOf": [{"type": "integer", "multipleOf": k} for k in (7, 11, 13, 17, 19, 23)]}, "of 323323"),
    "a small step": ({"type": "number", "multipleOf": 1.2345678}, "(multipleOf)"),
    "patterns": (
        {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(30)]},
        "30 patterns in one allOf",
    ),
    "names": ({"type": "object", "patternProperties": {f"^a{i}.*b{i}$": {} for i in range(500)}}, "500 patterns"),
    "levels": (json.loads('{"items":' * 70 + "{}" + "}" * 70), "nested more than 64 levels deep"),
    "values": ({"enum": [*range(60_000)]}, "more than 50000 values"),
    "a repetition": ({"type": "string", "pattern": "a{1000000}"}, "has a repeat count above 10000"),
}


def format_of(schema):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def refusal(answer):
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "response_format" and error["type"] == "invalid_request_error"
    return error["message"]


@pytest.mark.parametrize("kind", HOSTILE)
def test_schema_beyond_limits_is_rejected_before_compilation(running, kind):
    schema, words = HOSTILE[kind]
    message = refusal(post(running, LONG | format_of(schema)))
    assert words in message and message.endswith(".")


@pytest.fixture
def free_beside(running):
    """Run an unconstrained stream throughout the test, and check that its output never changes."""
    body = LONG | {"seed": 3, "stream": True}
    expected = texts_of(post(running, body).text)[0]
    stop, texts = threading.Event(), []

    def ask():
        while not stop.is_set() or not texts:
            texts.append(texts_of(post(running, body).text)[0])

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    assert httpx.get(f"{running.url}/health", timeout=60).status_code == 200
    stop.set()
    thread.join()
    assert {*texts} == {expected}


def test_hanging_compilation_is_rejected(running, free_beside, monkeypatch):
    monkeypatch.setattr("jspec.engine.grammars.check_schema", lambda _: None)
    monkeypatch.setattr(grammar_pool, "_COMPILE_SECONDS", 2.0)
    for name in ("a large multiple", "multiples", "patterns", "names"):
        assert "of memory to compile; simplify it." in refusal(post(running, LONG | format_of(HOSTILE[name][0])))


def test_stack_overflow_in_compilation_is_rejected(running, free_beside, monkeypatch):
    monkeypatch.setattr("jspec.engine.grammars.check_schema", lambda _: None)
    assert "to compile; simplify it." in refusal(post(running, LONG | format_of(chain(3000))))
    deep = {"response_format": {"type": "regex", "regex": "(" * 4000 + "a" + ")" * 4000}}
    refusal(post(running, LONG | deep))


def test_hanging_compilation_does_not_block_others(running, monkeypatch):
    monkeypatch.setattr("jspec.engine.grammars.check_schema", lambda _: None)
    with asking(running, LONG | format_of(HOSTILE["names"][0]), 2) as hanging:
        good = post(running, LONG | {"response_format": {"type": "regex", "regex": "(the|in) [a-c]{2}"}})
        assert good.status_code == 200 and good.json()["choices"][0]["finish_reason"] == "stop"
        monkeypatch.setattr(grammar_pool, "_COMPILE_SECONDS", 0.1)
        assert {answer.status_code for answer in hanging()} == {400}


class Planted:
    """Compiled grammars whose processes misbehave once decoding has begun."""

    def __init__(self, compile_, signal_):
        self.compile, self.signal = compile_, signal_

    def __call__(self, kind, text):
        grammar = self.compile(kind, text)
        make = grammar.__class__.__call__

        def source():
            made = make(grammar)
            ask = made.ask

            def asked(text, drafted, parents):
                if len(text) > 3:
                    os.kill(int(made._process), self.signal)
                ask(text, drafted, parents)

            made.ask = asked
            return made

        self.made = grammar
        return source


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [signal.SIGSEGV, signal.SIGSTOP])
def test_crashing_or_hanging_matcher_ends_only_its_request(running, free_beside, monkeypatch, kind, stream):
    monkeypatch.setattr(grammar_pool, "_MASK_SECONDS", 1.0)
    pool = running.server._served.grammars._pool
    planted = Planted(pool.compile, kind)
    monkeypatch.setattr(pool, "compile", planted)
    answer = post(running, LONG | {"response_format": {"type": "regex", "regex": "[a-z ]{90,99}"}, "stream": stream})
    error = answer.json()["error"] if not stream else texts_of(answer.text)[1][-1]["error"]
    assert error["code"] == "constraint_too_complex" and "too much time or memory after" in error["message"]
    assert error["param"] == "response_format" and error["type"] == "invalid_request_error"
    planted.made.close()


def test_process_server_is_restarted(running):
    body = SEEDED | {"response_format": {"type": "regex", "regex": "(the|in) [a-c]{2}"}}
    first = post(running, body).json()["choices"]
    running.server._served.grammars._pool._server._process.kill()
    running.server._served.grammars._pool._server._process.wait()
    assert post(running, body).json()["choices"] == first


def test_grammar_processes_survive_signals_to_whole_service(running):
    """A supervisor sends SIGTERM to each process; the server must still answer the requests that it has accepted."""
    pool = running.server._served.grammars._pool
    server, grammar = pool._server._process.pid, pool.compile("regular expression", "[a-z]{3}")
    masks = grammar()
    masks.ask([], [], [])
    assert masks.masks().masks.any()
    for process in (server, *below(server)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(process, number)
    masks.ask([], [], [])
    assert masks.masks().masks.any()
    masks.close()
    grammar.close()
    assert pool._server._process.poll() is None


def test_failed_fork_ends_only_its_connection(monkeypatch):
    def fork():
        raise BlockingIOError

    monkeypatch.setattr(grammar_worker.os, "fork", fork)
    before = signal.getsignal(signal.SIGCHLD)
    (ours, control), connections = socket.socketpair(), []
    try:
        with ours:
            connections = [grammar_pool._connect(ours) for _ in range(3)]
        grammar_worker._fork_for_each(control, lambda _: None)
        assert [connection.recv(1) for connection in connections] == [b""] * 3
    finally:
        signal.signal(signal.SIGCHLD, before)
        for end in (control, *connections):
            end.close()


def refusing(monkeypatch, running, kind):
    """Prevent processes from starting: forks fail, there are no sockets, or the process server cannot restart."""
    pool = running.server._served.grammars._pool

    def connect(_):
        if kind == "socket":
            raise OSError("Too many open files")
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    def start(_):
        raise ValueError("the grammar process has ended")

    if kind == "start":
        pool._server._process.kill()
        pool._server._process.wait()
        monkeypatch.setattr(grammar_pool, "_Server", start)
    else:
        monkeypatch.setattr(grammar_pool, "_connect", connect)


@pytest.mark.parametrize("kind", ["fork", "socket", "start"])
def test_failure_to_start_process_is_a_server_error(running, free_beside, monkeypatch, kind):
    body = SEEDED | {"response_format": {"type": "regex", "regex": "(the|in) [a-c]{2}"}}
    running.server._constraints._forget(0)  # a kept grammar needs no new compiler
    with monkeypatch.context() as patch:
        refusing(patch, running, kind)
        answer = post(running, body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("no_process", "server_error")
        assert error["message"] == "No process for a grammar can be started now; try again later."
    assert post(running, body).status_code == 200


@pytest.mark.parametrize("kind", ["matcher", "server"])
def test_lost_matcher_process_is_a_server_error(running, monkeypatch, kind):
    pool = running.server._served.grammars._pool
    grammar = pool.compile("regular expression", "[a-z]{3}")
    with monkeypatch.context() as patch:
        if kind == "matcher":
            refusing(patch, running, "fork")
        masks = grammar()
    if kind == "server":
        masks.ask([], [], [])
        assert masks.masks().masks.any()
        pool._server._process.kill()
        pool._server._process.wait()
    with pytest.raises(ConstraintError, match="send the request again") as error:
        for _ in range(1000):  # the process ends soon, but not at once
            masks.ask([], [], [])
            masks.masks()
    assert error.value.code == "constraint_failed"
    masks.close()
    grammar.close()


def test_disconnecting_clients_do_not_accumulate_processes(running, monkeypatch):
    """A compilation that has begun keeps its place even if its client leaves."""
    monkeypatch.setattr("jspec.engine.grammars.check_schema", lambda _: None)
    pool, constraints = running.server._served.grammars._pool, running.server._constraints
    pool.compile("regular expression", "[a-z]").close()  # another test may have stopped the process server
    server = pool._server._process.pid
    body, most = LONG | format_of(HOSTILE["names"][0]), 0
    for _ in range(20):
        with connected(running, body):
            until(lambda: running.server.open)
            time.sleep(0.1)
        until(lambda: not running.server.open)
        most = max(most, len(below(server)) - len(constraints._kept))
    assert 0 < most <= constraints._limiter.total_tokens
    until(lambda: len(below(server)) <= len(constraints._kept) and not constraints._limiter.borrowed_tokens)


def children():
    """Return the processes that compile and follow grammars, each with its parent."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as file, open(f"/proc/{name}/stat") as stat:
                if "grammar_worker" in file.read():
                    found[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # the process has ended
    return found


def below(parent):
    """Return the children of a process and their descendants."""
    known, found = children(), {parent}
    for _ in range(3):
        found |= {child for child, its in known.items() if its in found}
    return found - {parent}


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="it looks into /proc")
@pytest.mark.parametrize("kind", ["whole", "stream", "gone", "choices"])
def test_no_process_is_left_behind(running, kind, monkeypatch):
    server = running.server._served.grammars._pool._server._process.pid
    body = LONG | {"response_format": {"type": "regex", "regex": "[a-z ]{20,30}"}, "stream": kind == "stream"}
    if kind == "gone":
        device, is_gone = running.engine.device, threading.Event()
        decode_rounds = device.decode_rounds
        monkeypatch.setattr(device, "decode_rounds", lambda *one: (is_gone.wait(60), decode_rounds(*one))[1])
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json=body, timeout=0.05)
        is_gone.set()
    else:
        assert post(running, body | ({"n": 3} if kind == "choices" else {})).status_code == 200
    constraints = running.server._constraints
    until(lambda: not running.server.open and len(below(server)) <= len(constraints._kept))
    assert not constraints._held


@pytest.mark.parametrize("stream", [False, True])
def test_dead_end_is_a_server_error(running, stream):
    """The grammar lets a comma follow after which every name is used; other outputs end before the comma."""
    comma, end = (running.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ",}")
    outcomes = set()
    for seed in range(12):
        body = LONG | format_of(DEAD_END) | {"seed": seed, "logit_bias": {str(i): 60 for i in (*comma, *end)}}
        answer = post(running, body | {"stream": stream})
        failed = answer.status_code == 500 or '"error"' in answer.text
        if not failed:
            assert answer.status_code == 200
            outcomes.add("ended")
            continue
        error = texts_of(answer.text)[1][-1]["error"] if stream else answer.json()["error"]
        outcomes.add((error["code"], error["type"]))
        nothing_follows = "The constraint reached a state in which no token may follow"
        assert error["message"] == f"{nothing_follows}; try again with another seed, or simplify the constraint."
    assert outcomes == {"ended", ("constraint_dead_end", "server_error")}


def test_concurrent_constraints_are_all_answered(running, monkeypatch):
    """Requests are answered as far as there is room, and none waits forever."""
    body = SEEDED | {"response_format": {"type": "regex", "regex": "(the|in) [a-c]{2}"}}
    with asking(running, body, 8) as answers:
        found = answers()
    assert {answer.status_code for answer in found} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in found}) == 1


def test_mask_source_outlives_its_grammar_until_closed(running):
    """The limit is CPU time, so a busy machine rejects nothing."""
    assert grammar_worker._BURST < grammar_pool._MASK_SECONDS
    pool = running.server._served.grammars._pool
    grammar = pool.compile("regular expression", "[a-z]{3}")
    masks = grammar()
    masks.ask([], [], [])
    first = masks.masks().masks
    assert first.shape[0] == 1 and first.any() and not np.all(first == 0xFFFFFFFF)
    grammar.close()
    masks.ask([], [], [])  # a mask source outlives its grammar
    np.testing.assert_array_equal(masks.masks().masks, first)
    masks.close()
    until(lambda: masks._answer() is None)
