"""`jspec serve` as a process: start, errors at the start, and shutdown."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

import jspec
from bench.startup import SERVE
from jspec.serve.run import bound
from support import servers
from support.streams import until

pytestmark = pytest.mark.usefixtures("quick_compile")


def started(*options, command=("-m", "jspec", "serve")):
    """Start a server process with one draft length, and return it with the address that it prints.

    Later servers of this file find the programs of earlier ones in the cache of this run.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    options = "--port", 0, "--slots", 2, "--max-length", 128, *options
    options += ("--num-draft-tokens", 2) if "--draft" in options else ()
    command = [sys.executable, *map(str, command), *map(str, options)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    lines = [process.stderr.readline() for _ in range(3)]
    ready = (
        r"Compiling: this takes minutes the first time, and seconds once the programs are cached\n"
        r"Capacity: 2 sequences of 128 tokens \(\d+\.\d GB\)\nServing here at http://127.0.0.1:\d+\n"
    )
    if not re.fullmatch(ready, "".join(lines)):
        process.kill()  # otherwise reading the rest of its output never ends
        pytest.fail("".join(lines) + process.stderr.read())
    return process, lines[-1].split()[-1]


def test_sigterm_loses_no_answer(sources):
    """After SIGTERM, running streams finish, new requests are rejected, and the exit status is 0."""
    process, url = started(
        sources[0], "--draft", sources[1], "--name", "here", "--metrics-prefix", "vllm:", "--api-key", "secret"
    )
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
        body = {"model": "here", "prompt": "in a", "max_tokens": 120, "logit_bias": {"0": -100}, "seed": 1}
        whole = client.completions.create(**body)
        assert "vllm:request_success_total" in httpx.get(f"{url}/metrics").text
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        streams = [client.completions.create(**body, stream=True) for _ in range(4)]
        firsts = [next(stream).choices[0].text for stream in streams[:1]]
        process.send_signal(signal.SIGTERM)
        texts = [firsts[0] if i == 0 else "" for i in range(4)]
        for i, stream in enumerate(streams):
            texts[i] += "".join(chunk.choices[0].text for chunk in stream)
        assert texts == [whole.choices[0].text] * 4
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_sigterm_waits_for_slow_stream_readers(sources):
    """The server waits until clients have read streams that the engine finished long before.

    The output exceeds the buffers between server and client, whose content would not be lost anyway.
    """
    process, url = started(sources[0], "--draft", sources[1], "--name", "here")
    body = {"model": "here", "prompt": "in a", "n": 64, "max_tokens": 120, "logprobs": 20, "logit_bias": {"0": -100}}
    body |= {"return_token_ids": True, "return_origins": True}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            while "jspec_num_requests_running 0" not in (said := _metrics(url)) and said:
                time.sleep(0.1)
            time.sleep(2)  # the server checks twice a second
            ends = [line for line in (first, *lines) if '"finish_reason":"length"' in line or line == "data: [DONE]"]
        assert len(ends) == 65 and ends[-1] == "data: [DONE]"
        assert process.wait(20) == 0 and process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _metrics(url):
    """Return the metrics, or an empty string once the server takes no connections; those still queued are reset."""
    try:
        return httpx.get(f"{url}/metrics").text
    except (httpx.NetworkError, httpx.RemoteProtocolError):
        return ""


def test_second_signal_ends_server_at_once(sources):
    """A second signal ends the server without waiting for running answers and without an error message."""
    process, url = started(sources[0], "--draft", sources[1], "--name", "here")
    body = {"model": "here", "prompt": "in a", "n": 64, "max_tokens": 120, "logit_bias": {"0": -100}, "stream": True}
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # kept, because dropping the iterator disconnects the client
            assert next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


# `jspec serve` with a thread that is stuck forever: the one that parses requests, or the engine's.
STUCK = """
import sys, threading
from jspec.engine import heartbeat
heartbeat.PATIENCE = heartbeat._TIMES = 1
where = sys.argv.pop()
never = lambda *_: threading.Event().wait()
from jspec.cli import serve as command
command._SOON = 1
import jspec.serve.run, jspec.serve.job, jspec.engine.engine
from jspec.engine.runner import Runner
Runner.compile = jspec.engine.engine.warm_up = lambda *_: None
def run(server, *others, real=jspec.serve.run.run):
    if where == "engine":
        server._served.engine.device.decode_rounds = never
    else:
        jspec.serve.job.parse_request = never
    return real(server, *others)
jspec.serve.run.run = run
from jspec.cli import main
main()
"""


@pytest.mark.parametrize(("where", "stream"), [("worker", False), ("engine", True)])
def test_sigterm_ends_stuck_server(sources, where, stream):
    command = ["-c", STUCK, "serve", sources[0], "--plain", "--name", "here"]
    process, url = started(where, command=command)
    try:
        body = {"model": "here", "prompt": "in a", "max_tokens": 2, "stream": stream}
        threading.Thread(target=lambda: _post(f"{url}/v1/completions", body), daemon=True).start()
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == (where == "engine")  # 1 because the engine's thread was not joined
        assert "The remaining requests are abandoned." in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _post(url, body):
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url, json=body, timeout=120)


def test_stuck_event_loop_ends_process():
    """After a signal, a stuck event loop ends the process; once the server has ended, nothing ends the process."""
    code = """
import queue, sys, threading, time
from jspec.serve.run import _watch
limits = queue.SimpleQueue()
threading.Thread(target=_watch, args=(limits,), daemon=True).start()
for limit in eval(sys.argv[1]):
    time.sleep(0.3)
    limits.put(limit)
time.sleep(1)
"""
    for limits, status in (("[]", 0), ("[60, None]", 0), ("[60, 0.1]", 1), ("[0.1, None]", 1), ("[60]", 0)):
        assert subprocess.run([sys.executable, "-c", code, limits], timeout=60).returncode == status, limits


def test_ends_within_kills_process_after_limit():
    code = "from jspec.serve.run import ends_within; import threading\nwith ends_within(0.1): threading.Event().wait()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 1
    code = "from jspec.serve.run import ends_within; import time\nwith ends_within(0.2): pass\ntime.sleep(0.5)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_second_start_compiles_nothing(sources, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", SERVE, "serve", str(sources[0]), "--draft", str(sources[1])]
    command += ["--port", "0", "--slots", "2", "--max-length", "64", "--num-draft-tokens", "2"]

    def start():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        return map(int, done.stdout.partition("READY ")[2].split())

    (_, compiled), (hits, misses) = start(), start()
    assert compiled > 20 and hits >= compiled and misses == 0


def test_second_server_on_same_port_fails_at_once(sources, tmp_path, run):
    """The second server fails even while the first compiles and refuses clients; the port is free once that ends."""
    first = bound("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        bound("127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    code, _, error = run("serve", sources[0], "--port", port)
    assert code == 2 and "Address already in use" in error
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like `run`
    first.listen()
    with socket.create_connection(("127.0.0.1", port)) as client:
        first.accept()[0].close()  # from here on, the server's end of the connection lingers
        assert client.recv(1) == b""
    first.close()
    bound("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["", " "])
def test_empty_host_is_rejected(run, sources, host):
    with pytest.raises(ValueError, match="host is empty"):
        bound(host, 0)
    code, _, error = run("serve", sources[0], "--host", host, "--port", 0)
    assert code == 2 and error.startswith("jspec: --host is empty; pass an address")


def test_startup_mistakes_end_in_one_sentence(run, sources, tmp_path, monkeypatch):
    monkeypatch.setattr("jspec.engine.runner.Runner.compile", lambda _: pytest.fail("it went on"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        mistakes = {
            ("--port", port): f"--port {port}: Address already in use; choose another address or port.",
            ("--host", "no such place", "--port", 0): "cannot listen on --host no such place",
            ("--draft", servers.swapped(sources, tmp_path), "--port", 0): "id 40 is",
            ("--draft", servers.other_heads(tmp_path), "--port", 0): "was made for a target whose",
            ("--max-length", 10**6, "--port", 0): "is more than the",
            ("--metrics-prefix", "a-b", "--port", 0): "cannot start a name in Prometheus",
            ("--api-key", "a b", "--port", 0): "--api-key must consist of visible ASCII",
            ("--plain", "--num-draft-tokens", 2): "leave out --num-draft-tokens",
            ("--slots", 0): "--slots",
        }
        for options, said in mistakes.items():
            code, out, error = run("serve", sources[0], *options)
            assert (code, out) == (2, "") and error.startswith("jspec: ") and error.count("\n") == 1, error
            assert said in error


def test_missing_serve_packages_error_says_how_to_install(run, monkeypatch):
    monkeypatch.setattr("jspec.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    code, _, error = run("serve")
    assert code == 2 and "needs uvicorn; install jspec's serve extra" in error


def test_library_imports_without_serve_packages():
    hidden = "starlette uvicorn sse_starlette pydantic prometheus_client"
    code = f"import sys; sys.modules |= dict.fromkeys('{hidden}'.split()); import jspec, jspec.engine, jspec.cli.app"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert jspec.__version__
