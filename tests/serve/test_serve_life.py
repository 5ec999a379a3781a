"""Failures while a server runs: clients that leave, crowds, slow readers, a failing device, and shutdown."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time

import httpx
import openai
import pytest

from jspec.serve.sse import JobResponse, dump
from support import servers
from support.scripted import script
from support.serving import metrics
from support.streams import LONG, SEEDED, asking, connected, post, texts_of, until

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_frees_its_slot(running, gate, stream):
    """A client that leaves before its first token frees its slots, and other requests are unaffected."""
    before = metrics(running)["jspec_request_success_total", "abort"]
    with asking(running, SEEDED) as answers:
        until(lambda: running.server.open == 1)
        for _ in range(2):
            with connected(running, LONG | {"n": 2, "stream": stream}):
                until(lambda: running.server.open == 3)
                until(lambda: len(running.engine.running_requests) + running.engine.num_waiting >= 3)
            until(lambda: running.server.open == 1)
        gate.set()
        until(lambda: not running.engine.running_requests and not running.engine.num_waiting)
        assert answers()[0].json()["choices"][0]["text"] == post(running, SEEDED).json()["choices"][0]["text"]
    assert metrics(running)["jspec_request_success_total", "abort"] == before + 4
    assert running.server.open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_sends_extra_data_and_leaves_frees_its_slot(running, gate, stream):
    """Data sent after the request pauses reading, but not for good: the server notices that the client leaves."""
    with connected(running, LONG | {"stream": stream}, "Connection: keep-alive") as connection:
        until(lambda: running.engine.running_requests)
        time.sleep(0.2)
        connection.sendall(b"\r\nGET /health HTTP/1.1\r\n\r\n")
        time.sleep(0.1)
    left = time.monotonic()
    until(lambda: running.server.open == 0)
    assert time.monotonic() - left < 8, "not by the next ping, which comes every 15 seconds"
    gate.set()


def test_prompts_of_disconnected_clients_are_not_counted(running, gate):
    before = metrics(running)
    with asking(running, SEEDED, 3) as answers:
        until(lambda: running.server.open == 3)
        with connected(running, LONG):
            until(lambda: len(running.engine.running_requests) + running.engine.num_waiting == 4)
        until(lambda: running.server.open == 3)
        gate.set()
        read = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers())
    after = metrics(running)
    assert after["jspec_request_success_total", "abort"] == before["jspec_request_success_total", "abort"] + 1
    assert after["jspec_prompt_tokens_total",] == before["jspec_prompt_tokens_total",] + read


@pytest.fixture
def played(running, monkeypatch):
    """Yield a list that grows with every device call; each call is slowed down."""
    decode_rounds, calls = running.engine.device.decode_rounds, []
    monkeypatch.setattr(
        running.engine.device,
        "decode_rounds",
        lambda *some: (calls.append(1), time.sleep(0.05), decode_rounds(*some))[2],
    )
    yield calls


def test_client_leaving_midway_stops_decoding(running, played):
    """The slot is free long before the output would have ended."""
    whole = LONG | {"seed": 1, "max_tokens": 115}
    post(running, whole)
    until(lambda: not running.engine._loop.is_busy)
    all_of_it = len(played)
    with httpx.stream("POST", f"{running.url}/v1/completions", json=whole | {"stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: not running.server.open and not running.engine._loop.is_busy)
    assert len(played) - all_of_it < all_of_it - 2


def test_stop_string_frees_slot(running, played):
    letters = {str(i): 100 for i in running.tokenizer("abcdefgh")["input_ids"]}
    whole = LONG | {"seed": 1, "logit_bias": letters, "max_tokens": 115}
    text = post(running, whole).json()["choices"][0]["text"]
    until(lambda: not running.engine._loop.is_busy)
    all_of_it = len(played)
    with asking(running, whole | {"stop": text[1:7], "n": 2}) as answers:
        until(lambda: len(running.engine.running_requests) == 2)
        until(lambda: len(running.engine.running_requests) == 1)
        assert len(played) - all_of_it < all_of_it // 2, "the other one has long to go"
    first, second = answers()[0].json()["choices"]
    assert (first["text"], first["finish_reason"]) == (text[:1], "stop")
    assert (len(second["text"]), second["finish_reason"]) == (115, "length")


def test_long_body_of_unknown_length_is_rejected(running):
    answer = httpx.post(f"{running.url}/v1/completions", content=(b" " * 2**20 for _ in range(5)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")


def test_excess_requests_get_429(running, gate):
    """As many requests as fit are answered; the others get a 429 at once, whatever their content."""
    room = servers.OPTIONS["slots"] + servers.WAITING
    with asking(running, SEEDED, room) as answers:
        until(lambda: running.server.open == room)
        for body in (SEEDED, LONG | {"stream": True}, LONG | {"prompt": "x" * 10_000}):
            answer = post(running, body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError):
            running.client().completions.create(**SEEDED)
        until(lambda: len(running.engine.running_requests) + running.engine.num_waiting == room)
        gauges = metrics(running)
        assert gauges["jspec_num_requests_running",] + gauges["jspec_num_requests_waiting",] == room
        gate.set()
        assert {answer.status_code for answer in answers()} == {200}
        assert len({answer.json()["choices"][0]["text"] for answer in answers()}) == 1
    tried_again = running.client(max_retries=2).completions.create(**SEEDED)
    assert tried_again.choices[0].finish_reason == "length"


def test_choices_count_as_requests(running, gate):
    with asking(running, SEEDED | {"n": 6}) as answers:
        until(lambda: running.server.open == 6)
        assert post(running, SEEDED | {"n": 3}).status_code == 429
        with asking(running, SEEDED | {"n": 2}) as more:
            until(lambda: running.server.open == 8)
            gate.set()
            assert more()[0].status_code == answers()[0].status_code == 200


def test_slow_reader_does_not_affect_others(running):
    """A client that reads late gets the whole output, although the engine finished it long before."""
    body = LONG | {"stream": True, "seed": 1, "n": 3, "return_token_ids": True, "logprobs": 5}
    with connected(running, body) as slow:
        until(lambda: running.engine.running_requests)
        until(lambda: not running.engine.running_requests)
        until(lambda: running.server.open == 0)  # its places are free although it has read nothing
        assert post(running, SEEDED).status_code == 200
        raw = b"".join(iter(lambda: slow.recv(65536), b""))
    pieces, rest = [], raw.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        pieces.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    _, parts, last = texts_of(b"".join(pieces).decode())
    assert last == "[DONE]"
    assert sum(len(choice["token_ids"]) for part in parts for choice in part["choices"]) == 300


@pytest.mark.parametrize("patience", [0.1, 60])
def test_whole_answer_counts_as_unread_until_sent(monkeypatch, patience):
    """An answer is unread until it is sent, or until its client has taken none of it for too long."""
    monkeypatch.setattr("jspec.serve.sse._PATIENCE", patience)
    told, sent = [], []

    class Job:
        def delivered(self):
            told.append(len(sent))

    async def send(message):
        await asyncio.sleep(0 if patience > 1 or len(sent) < 3 else 60)
        sent.append(message)

    async def answer():
        content = {"choices": [{"text": "x" * 2**17}] * 4}
        await JobResponse(Job(), content)({"type": "http"}, asyncio.Future, send)
        assert b"".join(one.get("body", b"") for one in sent).decode() == dump(content)

    with contextlib.nullcontext() if patience > 1 else pytest.raises(TimeoutError):
        asyncio.run(answer())
    assert (told == [len(sent)] and len(sent) > 5) or (patience < 1 and told == [3])


def test_incomplete_body_times_out(running, monkeypatch):
    monkeypatch.setattr("jspec.serve.request_body._PATIENCE", 0.2)
    host, port = running.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.connect((host, int(port)))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        answer = b""
        while b"did not arrive within" not in answer:
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
    assert answer.startswith(b"HTTP/1.1 408") and running.server.open == 0


def test_device_failure_is_recovered_or_reported(running, monkeypatch):
    """Seeded requests continue unchanged; others end with an error, which a stream sends as an event."""
    expected = post(running, SEEDED).json()["choices"][0]["text"]
    decode_rounds, fails = running.engine.device.decode_rounds, [True, True]

    def failing(*arguments):
        if fails:
            fails.pop()
            raise RuntimeError("a secret of the device")
        return decode_rounds(*arguments)

    monkeypatch.setattr(running.engine.device, "decode_rounds", failing)
    answer = post(running, SEEDED | {"seed": None})
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_failed"
    assert "secret" not in answer.text
    assert post(running, SEEDED).json()["choices"][0]["text"] == expected
    fails.append(True)
    stream = post(running, SEEDED | {"seed": None, "stream": True})
    _, parts, last = texts_of(stream.text)
    assert stream.status_code == 200 and parts[-1]["error"]["code"] == "engine_failed" and last == "[DONE]"
    with pytest.raises(openai.APIError, match="engine failed"):
        fails.append(True)
        list(running.client().completions.create(**(SEEDED | {"seed": None, "stream": True})))
    assert httpx.get(f"{running.url}/health").status_code == 200
    assert running.server.open == 0


def test_only_pings_precede_first_token(running, gate, monkeypatch):
    """Clients would mistake a chunk with only the role for the first token. No ping is sent between tokens."""
    monkeypatch.setattr("jspec.serve.sse._PING", 0.001)
    body = {"model": servers.NAME, "messages": servers.HELLO, "max_tokens": 40, "n": 2, "stream": True, "seed": 1}
    with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body, timeout=60) as answer:
        pieces = answer.iter_text()
        early = "".join(itertools.islice(pieces, 3))
        assert answer.status_code == 200 and set(early.splitlines(keepends=True)) == {": ping\n", "\n"}
        gate.set()
        rest = "".join(pieces)
    assert ": ping" not in rest[rest.index("data: ") :] and "\n\ndata: " in early + rest
    lines = [line.removeprefix("data: ") for line in rest.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    for index in range(2):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert deltas[0]["role"] == "assistant" and not any("role" in delta for delta in deltas[1:])
    gate.clear()
    opener = threading.Timer(0.5, gate.set)
    opener.start()
    stream = running.client().chat.completions.create(**body)
    texts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices[0].index == 0]
    assert "".join(texts) == running.chat(max_completion_tokens=40, seed=1).choices[0].message.content


def test_draining_server_rejects_new_requests(running, gate, monkeypatch):
    """Accepted requests are answered, and new ones rejected."""
    monkeypatch.setattr("jspec.serve.run._Uvicorn.on_tick", _never)
    with asking(running, SEEDED) as answers:
        until(lambda: running.server.open == 1)
        monkeypatch.setattr(running.server, "is_draining", True)
        for answer in (post(running, SEEDED), httpx.get(f"{running.url}/health")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        gate.set()
        assert answers()[0].status_code == 200
    monkeypatch.setattr(running.server, "is_draining", False)
    assert httpx.get(f"{running.url}/health").status_code == 200


def test_cancelled_requests_are_not_attributed_to_a_shutdown(running, monkeypatch):
    """A weight update cancels requests, while the server keeps running."""
    script(monkeypatch, running, "abc", end="cancelled")
    answer = post(running, SEEDED)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "cancelled")
    assert answer.headers["retry-after"] == "1"


async def _never(*_):
    return False
