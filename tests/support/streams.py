"""Helpers for the tests of a running server's failures, and others."""

import contextlib
import json
import socket
import threading
import time

import httpx

from support import servers

LONG = {"model": servers.NAME, "prompt": "in a thing", "max_tokens": 100, "logit_bias": {"0": -100}}


SEEDED = LONG | {"seed": 3, "max_tokens": 20}


def post(running, body, path="completions", **options):
    return httpx.post(f"{running.url}/v1/{path}", json=body, timeout=60, **options)


def until(true):
    """Wait until `true()` holds."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextlib.contextmanager
def asking(running, body, count=1):
    """Send concurrent requests; ``answers()`` waits for all of them."""
    found = [None] * count

    def ask(i):
        found[i] = post(running, body)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()

    def answers():
        for thread in threads:
            thread.join()
        return found

    yield answers
    answers()


def texts_of(stream):
    """Return the text of a stream's events, the events, and the last of them."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]  # without pings
    parts = [json.loads(event) for event in events[:-1]]
    return "".join(choice["text"] for part in parts for choice in part.get("choices", [])), parts, events[-1]


@contextlib.contextmanager
def connected(running, body, header="Connection: close"):
    """Open a bare connection and request a completion on it; the answer is not read."""
    host, port = running.url.removeprefix("http://").split(":")
    sent = json.dumps(body).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (header.encode(), len(sent), sent)
        )
        yield connection
