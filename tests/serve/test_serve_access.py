"""The hosts and pages that a server answers: DNS rebinding, other sites, and preflight requests."""

import asyncio
import contextlib
import json
import socket

import httpx
import openai
import pytest

from jspec.serve.access import Access, Guard
from jspec.serve.hosts import origin_of
from support import servers

pytestmark = pytest.mark.usefixtures("quick_compile")
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    "Access-Control-Request-Private-Network": "true",
}


def asked(headers, access=None, *, has_key=False, method="POST", path="/v1/completions"):
    """Return the status, headers and JSON error of the answer to these headers, which may repeat."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"code": null}}'})

    async def send(message):
        sent.append(message)

    async def receive():
        pytest.fail("the body was read")

    pairs = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": pairs}
    asyncio.run(Guard(app, access or Access(), has_key)(scope, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], httpx.Headers(sent[0]["headers"]), body and body != b"OK" and json.loads(body)["error"]


OWN = [
    *("localhost:8000", "localhost", "LOCALHOST:8000", "localhost.:8000", "127.0.0.1:8000", "127.0.0.2"),
    *("[::1]:8000", "[::1]", "[::ffff:127.0.0.1]:8000", "localhost:9999", "localhost:", "127.0.0.1."),
]
FOREIGN = [
    *("evil.example:8000", "evil.example", "EVIL.example.", "localhost.evil.example", "evillocalhost", ""),
    *("localhost@evil.example", "evil.example@localhost", "evil.example:80@localhost:8000"),
    *("localhost:8000:1", "127.0.0.1.nip.io", "[::1", "[evil.example]", "::1", "0.0.0.0:8000"),
    *("192.168.1.5:8000", "[fe80::1]", "xn--lcalhost-d4a", "localhost/evil.example"),
    *("localhost evil.example", "a" * 300, "http://localhost:8000", "localhost:port", "[2001:db8::1]:8000"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/metrics", "/version", "/", "/none"])
def test_unknown_host_is_rejected(path):
    for host in OWN:
        assert asked([("Host", host)], path=path)[0] == 200, host
    for host in FOREIGN:
        status, _, error = asked([("Host", host)], path=path)
        assert (status, error["code"]) == (403, "unknown_host"), host


def test_rejection_messages_say_what_to_do():
    said = asked([("Host", "evil.example:8000")])[2]["message"]
    assert said == (
        "'evil.example:8000' is not a name of this server; start the server with --allow-host for that name, or "
        "with an API key."
    )
    assert asked([])[2]["message"] == "The request has no host; send a Host header."
    said = asked([("Host", "localhost"), ("Origin", "https://a.org")])[2]["message"]
    assert (
        said
        == "Pages from 'https://a.org' may not use this server; start the server with --allow-origin for these pages."
    )


def test_request_with_any_unknown_host_is_rejected():
    assert asked([("Host", "localhost"), ("Host", "evil.example")])[0] == 403
    assert asked([("Host", "localhost")], path="http://evil.example/v1/completions")[0] == 403
    assert asked([("Host", "evil.example")], path="http://localhost/v1/completions")[0] == 403
    assert asked([("Host", "localhost")], path="http://localhost/v1/completions")[0] == 200


@pytest.mark.parametrize(
    ("listens", "own", "foreign"),
    [
        ("0.0.0.0", ["192.168.1.5:8000", "0.0.0.0:8000", "[::1]", socket.gethostname()], ["evil.example", ""]),
        ("::", ["192.168.1.5:8000", "[2001:db8::1]:8000", "localhost", "[::]:8000"], ["evil.example"]),
        ("192.168.1.5", ["192.168.1.5:8000", "localhost", socket.gethostname().upper()], ["192.168.1.6", "a.example"]),
        ("::1", ["[::1]:8000", "[0:0:0:0:0:0:0:1]", "localhost"], ["[::2]"]),
        ("fe80::1%eth0", ["[fe80::1]:8000", "localhost"], ["[fe80::2]", "192.168.1.5"]),
        ("here.example", ["here.example:8000", "Here.Example."], ["there.example", "192.168.1.5"]),
    ],
)
def test_accepted_hosts_depend_on_listening_address(listens, own, foreign):
    for host in own:
        assert asked([("Host", host)], Access(listens))[0] == 200, host
    for host in foreign:
        assert asked([("Host", host)], Access(listens))[0] == 403, host


def test_additional_hosts_and_api_keys_allow_access():
    access = Access(hosts=("Model.example", "münchen.example", "10.0.0.7"))
    for host in ("model.example:8000", "xn--mnchen-3ya.example", "10.0.0.7:80", "localhost"):
        assert asked([("Host", host)], access)[0] == 200, host
    assert asked([("Host", "other.example")], access)[0] == 403
    assert asked([("Host", "other.example")], Access(hosts=("*",)))[0] == 200
    assert asked([("Host", "other.example"), ("Origin", "http://evil.example")], Access(hosts=("*",)))[0] == 403
    assert asked([("Host", "other.example"), ("Origin", "http://evil.example")], has_key=True)[0] == 200


def test_health_probes_may_use_any_host():
    for headers in ([], [("Host", "10.1.2.3:8000")], [("Host", "pod.example")]):
        assert asked(headers, method="GET", path="/health")[0] == 200
    assert asked([("Host", "pod.example")], path="/healthy")[0] == 403


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", "http://localhost:8000", 200),
        ("LOCALHOST:8000", "http://localhost:8000", 200),
        ("localhost:8000", "https://localhost:8000", 200),  # a proxy adds TLS
        ("localhost", "http://localhost", 200),
        ("localhost:443", "https://localhost", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "http://localhost", 403),
        ("localhost:8000", "http://127.0.0.1:8000", 403),
        ("localhost:8000", "http://evil.example:8000", 403),
        ("localhost:8000", "http://localhost:8000.evil.example", 403),
        ("localhost:8000", "http://localhost:8000@evil.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "", 403),
        ("localhost:8000", "localhost:8000", 403),
        ("localhost:8000", "file://localhost:8000", 403),
        ("localhost:8000", "chrome-extension://localhost:8000", 403),
        ("localhost:8000", "http://localhost:8000/", 403),
        ("localhost:8000", "http://localhost:8000 http://evil.example", 403),
    ],
)
def test_cross_origin_request_is_rejected(host, origin, status):
    for method in ("GET", "POST", "OPTIONS"):
        for more in ([], [("Sec-Fetch-Site", "same-origin")]):
            found, headers, error = asked([("Host", host), ("Origin", origin), *more], method=method)
            assert found == status and "access-control-allow-origin" not in headers
            assert status == 200 or error["code"] == "cross_origin"


def test_request_with_two_origins_is_rejected():
    same = ("Origin", "http://localhost")
    assert asked([("Host", "localhost"), same, ("Origin", "http://evil.example")])[0] == 403
    access = Access(origins=("http://evil.example",))
    assert asked([("Host", "localhost"), ("Origin", "null"), ("Origin", "http://evil.example")], access)[0] == 403


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_cross_site_request_without_origin_is_rejected(site, status):
    headers = [("Host", "localhost"), ("Sec-Fetch-Site", site)]
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/"), ("GET", "/metrics")):
        assert asked(headers, method=method, path=path)[0] == status
    assert asked(headers, method="GET", path="/")[0] == 200  # a link to the page


@pytest.mark.parametrize("has_key", [False, True])
def test_preflight_requests_are_answered(has_key):
    access = Access(origins=("https://a.org", "vscode-webview://some-id"))
    for origin in access.origins:
        headers = [("Host", "localhost"), ("Origin", origin), *PREFLIGHT.items()]
        status, answer, _ = asked(headers, access, has_key=has_key, method="OPTIONS")
        assert status == 200 and answer["access-control-allow-origin"] == origin
        assert "POST" in answer["access-control-allow-methods"] and "Origin" in answer["vary"]
        assert answer["access-control-allow-headers"] == PREFLIGHT["Access-Control-Request-Headers"]
        assert answer["access-control-allow-private-network"] == "true"
        status, answer, _ = asked(headers[:2], access, has_key=has_key)
        assert status == 200 and answer["access-control-allow-origin"] == origin
    for origin in ("https://b.org", "https://a.org.evil.example", "http://a.org", "https://a.org:444", "null"):
        headers = [("Host", "localhost"), ("Origin", origin), *PREFLIGHT.items()]
        for method in ("OPTIONS", "POST"):
            status, answer, _ = asked(headers, access, has_key=has_key, method=method)
            assert (status == 200) == has_key and "access-control-allow-origin" not in answer


def test_wildcard_origin_allows_any_page():
    access = Access(origins=("*",))
    for origin in ("https://a.org", "null"):
        status, answer, _ = asked([("Host", "localhost"), ("Origin", origin)], access)
        assert status == 200 and answer["access-control-allow-origin"] == "*"
    assert asked([("Host", "evil.example"), ("Origin", "http://evil.example")], access)[0] == 403


def test_allowed_page_can_read_rejection():
    status, answer, _ = asked(
        [("Host", "evil.example"), ("Origin", "https://a.org")], Access(origins=("https://a.org",))
    )
    assert status == 403 and answer["access-control-allow-origin"] == "https://a.org"


def test_host_and_origin_options_are_validated(run, sources):
    assert origin_of("HTTPS://A.org:443") == "https://a.org" and origin_of("http://[::1]:80") == "http://[::1]"
    assert origin_of("https://münchen.example:8443") == "https://xn--mnchen-3ya.example:8443"
    mistakes = {
        ("--allow-host", "http://a.org"): "'http://a.org' is not a host",
        ("--allow-host", "a.org:80"): "'a.org:80' is not a host",
        ("--allow-host", ""): "'' is not a host",
        ("--allow-origin", "a.org"): "'a.org' is not an origin; write an origin such as https://example.com",
        ("--allow-origin", "https://a.org/"): "without a path",
        ("--allow-origin", "null"): "'null' is not an origin",
    }
    for options, said in mistakes.items():
        code, _, error = run("serve", sources[0], "--port", 0, *options)
        assert code == 2 and said in error and error.count("\n") == 1, error


def raw(url, request):
    """Return everything that a server answers to these bytes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_rejected_requests_compute_nothing(running, monkeypatch):
    """Foreign requests are rejected on the wire before their body arrives."""
    monkeypatch.setattr(running.server, "_enter", lambda _: pytest.fail("it went on"))
    length = b"Content-Length: 100\r\nConnection: close\r\n\r\n"
    for head in (
        b"Host: evil.example:8000\r\nOrigin: http://evil.example:8000\r\n",
        b"Host: localhost\r\nOrigin: http://localhost:3000\r\n",
        b"Host: \r\n",
    ):
        assert raw(running.url, b"POST /v1/completions HTTP/1.1\r\n" + head + length).startswith(b"HTTP/1.1 403 ")
    assert raw(running.url, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 403 ")
    whole = b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert raw(running.url, whole).startswith(b"HTTP/1.1 403 ")
    twice = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    answer = raw(running.url, twice)
    assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_chat_page_may_use_its_server(running):
    own = {"Origin": running.url, "Sec-Fetch-Site": "same-origin"}
    assert "<script" in httpx.get(running.url).text
    assert httpx.get(f"{running.url}/v1/models", headers=own).status_code == 200


@pytest.fixture(scope="module")
def guarded(sources):
    """Yield a server with a key and an origin that may use it."""
    with servers.running(sources, api_key="secret", access=Access(origins=("https://a.org",))) as running:
        yield running


def test_allowed_page_can_read_answers_errors_and_streams(guarded):
    page = {"Origin": "https://a.org", "Sec-Fetch-Site": "cross-site"}
    url, body = f"{guarded.url}/v1/completions", {"model": servers.NAME, "prompt": "in a", "max_tokens": 2}
    assert httpx.options(url, headers=page | PREFLIGHT).status_code == 200
    for key, more, status in (
        ("secret", {}, 200),
        ("secret", {"stream": True}, 200),
        ("secret", {"n": "x"}, 400),
        ("wrong", {}, 401),
    ):
        answer = httpx.post(url, json=body | more, headers=page | {"Authorization": f"Bearer {key}"}, timeout=60)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, "https://a.org")
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(openai.APIError):
        patch.setattr("jspec.serve.app.number_of_choices", lambda _: 1 / 0)
        answer = httpx.post(url, json=body, headers=page | {"Authorization": "Bearer secret"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, "https://a.org")
