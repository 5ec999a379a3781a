"""Connections that keep a server waiting: idle ones, half-sent heads, crowds of both, and input that is not HTTP."""

import asyncio
import contextlib
import errno
import functools
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from jspec.serve import connections
from support import servers
from support.streams import LONG, SEEDED, connected, post, until

pytestmark = pytest.mark.usefixtures("quick_compile")
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def hasty(sources):
    """Yield a server that waits at most one second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "_HEAD", 1.0)
        with servers.running(sources, keep_alive=1) as running:
            yield running


def opened(running):
    """Open a bare connection."""
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 60)


@pytest.mark.parametrize(
    "sent", [b"", HEALTH[:1], HEALTH, HEALTH + b"X: y", HEALTH + b"\r\n", HEALTH + b"\r\n" + HEALTH]
)
def test_idle_client_is_disconnected(hasty, sent):
    with opened(hasty) as connection:
        connection.sendall(sent)
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answers.count(b'{"status":"ok"}') == (HEALTH + b"\r\n" in sent)


def test_slowly_sent_header_is_cut_off(hasty):
    with opened(hasty) as connection, pytest.raises(OSError):
        for _ in range(600):
            connection.sendall(b"G")
            time.sleep(0.1)
            connection.settimeout(0.01)
            try:
                assert connection.recv(1) == b""
                raise ConnectionError
            except TimeoutError:
                pass


def test_unread_body_does_not_keep_connection_alive(hasty):
    """The answer comes before the body is sent, so the body's bytes must not keep the connection alive."""
    with opened(hasty) as connection, pytest.raises(OSError):
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        for _ in range(600):
            connection.sendall(b"x")
            time.sleep(0.1)


@pytest.mark.parametrize("path", ["metrics", "v1/models"])
def test_client_that_never_reads_is_disconnected(hasty, monkeypatch, path):
    """A client that never reads is disconnected, because even small answers fill every buffer if there are many."""
    monkeypatch.setattr(connections, "_TAKE", 1.0)
    with opened(hasty) as connection, pytest.raises(ConnectionError):
        for _ in range(100_000):
            connection.sendall(b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode() * 10)


def test_unread_connections_count_as_waiting(hasty):
    """A new client is answered even if every connection has a running request."""
    requests = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10
    with opened(hasty) as connection:
        connection.settimeout(2)
        with contextlib.suppress(TimeoutError):
            while True:
                connection.sendall(requests)
        # Do not use isinstance: it reads `__class__`, and some PyTorch objects then warn.
        kept = [one for one in gc.get_objects() if type(one) is connections.Connection]
        unread = [one for one in kept if one.cycle is not None and not one.cycle.response_complete]
        assert unread and all(one.is_waiting for one in unread)


def test_client_waiting_for_answer_is_not_disconnected(hasty, monkeypatch):
    """A stream or a whole answer may take longer than a client may be idle."""
    decode_rounds = hasty.engine.device.decode_rounds
    monkeypatch.setattr(
        hasty.engine.device, "decode_rounds", lambda *given: (time.sleep(0.3), decode_rounds(*given))[1]
    )
    for stream in (True, False):
        answer = post(hasty, SEEDED | {"stream": stream})
        assert answer.status_code == 200 and ("[DONE]" in answer.text) == stream


def test_connections_are_reused(hasty):
    with httpx.Client(base_url=hasty.url) as client:
        for _ in range(5):
            time.sleep(0.3)  # more than a second in total
            assert client.get("/health").status_code == 200
    with opened(hasty) as connection:  # pipelined requests
        connection.sendall((HEALTH + b"\r\n") * 5)
        assert b"".join(iter(lambda: connection.recv(65536), b"")).count(b'{"status":"ok"}') == 5


def test_default_keep_alive_exceeds_client_pools(run):
    assert re.search(r"--keep-alive SECONDS.*\[default: 75", " ".join(run("serve", "--help")[1].split()))


@pytest.mark.parametrize(
    "sent", [b"hello\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", b"G" * 70_000]
)
def test_invalid_http_gets_json_error(running, caplog, sent):
    with opened(running) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"] == "The request is not valid HTTP/1.1."
    assert len(caplog.records) <= 1


def test_upgrade_request_is_ignored(running, caplog):
    with opened(running) as connection:
        connection.sendall(HEALTH + b"Connection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n")
        connection.sendall(b"")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


def test_waiting_connections_are_closed_for_new_request(sources, monkeypatch, caplog):
    """The oldest connections with no request, half a request or half a body are closed, never one being answered."""
    monkeypatch.setattr("jspec.serve.run.most_connections", lambda: 20)
    monkeypatch.setattr("jspec.engine.runner.Runner.compile", lambda _: None)
    monkeypatch.setattr("jspec.engine.engine.warm_up", lambda *_: None)
    with servers.running(sources) as running:
        decode_rounds = running.engine.device.decode_rounds
        monkeypatch.setattr(
            running.engine.device, "decode_rounds", lambda *given: (time.sleep(0.05), decode_rounds(*given))[1]
        )
        with connected(running, LONG | {"stream": True}) as stream:
            until(lambda: running.engine.running_requests)
            crowd = [opened(running) for _ in range(60)]
            half_a_body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n{"
            for connection, sent in zip(crowd, [b"", b"GET / HTTP/1.1\r\n", half_a_body] * 20, strict=True):
                with contextlib.suppress(OSError):  # may have been closed to make room
                    connection.sendall(sent)
            assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200
            text = b"".join(iter(lambda: stream.recv(65536), b""))
            assert text.count(b"data: [DONE]") == 1
        for connection in crowd:
            connection.close()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 2


def test_new_connections_wait_for_busy_ones(sources, monkeypatch):
    """New connections wait only until a place is free, and all get their answers."""
    monkeypatch.setattr("jspec.serve.run.most_connections", lambda: 2)
    monkeypatch.setattr("jspec.engine.runner.Runner.compile", lambda _: None)
    monkeypatch.setattr("jspec.engine.engine.warm_up", lambda *_: None)
    with servers.running(sources) as running:
        streams = [connected(running, LONG | {"stream": True, "max_tokens": 20}) for _ in range(6)]
        entered = [stream.__enter__() for stream in streams]
        for connection in entered:
            assert b"data: [DONE]" in b"".join(iter(functools.partial(connection.recv, 65536), b""))
        for stream in streams:
            stream.__exit__(None, None, None)
        assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200


def test_server_survives_lack_of_file_descriptors(running, monkeypatch, caplog):
    """Idle connections are closed to make room, and the log says so once."""
    with opened(running) as connection:
        connection.sendall(HEALTH + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")  # idle from here on
        fails, real = [OSError(errno.EMFILE, "Too many open files")] * 3, asyncio.SelectorEventLoop.sock_accept

        async def failing(loop, listener):
            if fails:
                raise fails.pop()
            return await real(loop, listener)

        monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", failing)
        assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200  # taken by the accept in progress
        assert httpx.get(f"{running.url}/health", timeout=30).status_code == 200
        assert not fails
        assert b"HTTP" not in b"".join(iter(lambda: connection.recv(65536), b""))
    assert len([record for record in caplog.records if "cannot be accepted" in record.getMessage()]) == 1


def test_warnings_are_rate_limited(caplog):
    log = logging.getLogger("jspec.test")
    log.addFilter(connections.Seldom())
    for i in range(100):
        log.warning("Of %s.", i)
        log.error("An error.")
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert len(caplog.records) == 101


# A server for a thousand clients with 512 file descriptors, on an engine that receives no request.
CROWD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
import jspec
from support import text_pair
from jspec.engine import Engine
from jspec.serve.app import Server
from jspec.serve.run import bound, run
listener = bound("127.0.0.1", 0)
listener.listen(2048)
print(listener.getsockname()[1], flush=True)
run(Server(Engine(jspec.load(sys.argv[1])), text_pair.tokenizer(), "tiny"), listener)
"""


def ask_health(address):
    with socket.create_connection(address, 60) as probe:
        probe.sendall(HEALTH + b"\r\n")
        assert probe.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.skipif(sys.platform == "win32", reason="sockets are not files")
def test_1000_idle_connections_do_not_block_server(sources, report):
    import resource

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["tests", os.getcwd()])}
    process = subprocess.Popen(
        [sys.executable, "-c", CROWD, str(sources[0])],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        address = "127.0.0.1", int(process.stdout.readline())
        ask_health(address)  # the server has started
        crowd = [socket.create_connection(address, 60) for _ in range(1200)]
        for connection in crowd[-200:]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        began = time.perf_counter()
        ask_health(address)
        report(seconds_to_health=f"{time.perf_counter() - began:.3f}")
        for connection in crowd:
            connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr.read().count("\n") <= 5
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
