"""Bodies that cannot be served: the right status, a one-sentence error in OpenAI's format, and no computation."""

import json
import time

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.testclient import TestClient

import jspec
from jspec.engine import Engine
from jspec.engine.runner import Runner
from jspec.serve.app import Server
from jspec.serve.chat_schemas import ChatBody
from jspec.serve.sse import dump, dump_pieces
from support import servers
from support.bad_bodies import CHAT, TEXT, bodies

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def server(sources):
    """Yield a server on an engine that accepts no request."""
    target, draft = (jspec.load(folder) for folder in sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "compile", lambda _: None)
        patch.setattr("jspec.engine.engine.warm_up", lambda *_: None)
        patch.setattr(Engine, "_queue", lambda *_: pytest.fail("something was computed"))
        with Engine(target, draft, **servers.OPTIONS) as engine:
            yield Server(engine, servers.tokenizer(), servers.NAME, max_waiting=servers.WAITING, max_body=2**20)


def client_of(server):
    return TestClient(server.app, raise_server_exceptions=False, base_url="http://localhost")


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def refused(answer, status):
    """Check an error answer, and return its error."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    message = error["message"]
    assert message and "\n" not in message and message.endswith(".") and len(message) < 400, message
    assert not any(word in message for word in ("Traceback", "pydantic", "Error:", "{place}", "__", "Value error"))
    return error


def test_bad_bodies_are_rejected(client, server, report):
    cases = [*bodies()]
    assert len(cases) >= 120
    for path, body, name in cases:
        answer = client.post(f"/v1/{path}", content=body)
        assert answer.status_code == 400, (path, body[:200], answer.text)
        error = refused(answer, 400)
        if name is not None and name.isascii():
            assert name in error["message"] or name in ("prompt", "messages", "input"), (body[:200], error)
            assert (error["param"] or name).startswith(name), (body[:200], error)
        assert server.open == 0
    report(bodies=len(cases))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": -1}, "temperature is -1; expected a number greater than or equal to 0."),
        ({"top_k": "many"}, "top_k is 'many'; expected a valid integer."),
        ({"foo": 1}, "foo is not a field that this server supports; omit this field."),
        ({"": 1}, "'' is not a field that this server supports; omit this field."),
        ({"suffix": "x"}, "suffix is not supported by this server; omit this field."),
        ({"best_of": 3, "n": 2}, "best_of must equal n, because no choice is discarded; omit best_of."),
        (
            {"prompt": "x" * 120, "min_tokens": 9},
            "The prompt (120 tokens) and min_tokens (9) exceed the 128 tokens that prompt and output may have in "
            "total; reduce one of the two.",
        ),
        ({"stream_options": 1}, "stream_options is 1; expected an object."),
        ({"stop": ["a"] * 17}, "stop should have at most 16 items, not 17."),
        ({"cache_salt": "\ud800"}, "The body contains '\\ud800', which is half a surrogate pair; send both halves."),
        (
            {"prompt": "x" * 10**5},
            "There are 100000 characters in prompt, too many for the 128 tokens that prompt and output may have in "
            "total; shorten the text.",
        ),
        ({"temperature": float("nan")}, "The body is not valid JSON: NaN is not a JSON number."),
        ({"prompt": [261]}, "prompt holds the id 261, outside the vocabulary of 261 tokens."),
        ({"stop_token_ids": [300]}, "stop_token_ids holds 300, outside the vocabulary of 261 tokens."),
        (
            {"prompt": [1] * 128},
            "There are 128 tokens in prompt, but prompt and output may have at most 128 in total; shorten the prompt.",
        ),
        ({"temperature": {str(i): 1 for i in range(60)}}, "temperature is {...}; expected a valid number."),
        (
            {"response_format": {"type": "regex"}},
            "response_format must have regex if, and only if, its type is 'regex'.",
        ),
        (
            {"response_format": {"type": "owl"}},
            "response_format.type is 'owl'; expected 'text', 'json_object', 'json_schema' or 'regex'.",
        ),
        ({"n": 100}, "The request has 100 choices in total, and the server accepts at most 8; request fewer choices."),
    ],
)
def test_errors_are_one_clear_sentence(client, fields, sentence):
    body = json.dumps(TEXT | fields)
    assert refused(client.post("/v1/completions", content=body), 400)["message"] == sentence


def test_null_fields_count_as_absent(client):
    """Null fields, which clients do send, count as absent: this request fails only because of its last field."""
    nulls = dict.fromkeys(("suffix", "tools", "stop", "seed", "logit_bias", "max_tokens", "best_of", "user"))
    answer = client.post("/v1/completions", json=TEXT | nulls | {"temperature": -1})
    assert "temperature" in refused(answer, 400)["message"]


def test_other_mistakes_have_proper_status(client):
    assert refused(client.post("/v1/completions", json=TEXT | {"model": "gpt-4"}), 404)["code"] == "model_not_found"
    assert refused(client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    refused(client.get("/v1/completions"), 405)
    refused(client.post("/v1/completions", json=TEXT | {"model": "\x7f" * 10**5}), 404)
    assert len(refused(client.post("/v1/completions", json=TEXT | {"x" * 10**5: 1}), 400)["param"]) <= 300
    refused(client.post("/health"), 405)
    assert "no embeddings" in refused(client.post("/v1/embeddings", json={"input": "x"}), 404)["message"]
    refused(client.post("/v1/audio/speech", json={}), 404)
    error = refused(client.post("/v1/completions", content=b" " * (2**20 + 1)), 413)
    assert error["code"] == "body_too_long"


def test_cross_site_pages_need_an_api_key(server, client):
    """Browsers name the page's site, and let pages send anything although they may not read the answer."""
    for site, status in (("cross-site", 403), ("same-origin", 400), ("none", 400)):
        answer = client.post("/v1/completions", content=b"{}", headers={"Sec-Fetch-Site": site})
        assert answer.status_code == status
    guarded = Server(server._served.engine, servers.tokenizer(), servers.NAME, api_key="secret")
    headers = {"Sec-Fetch-Site": "cross-site", "Authorization": "Bearer secret"}
    assert TestClient(guarded.app, base_url="http://localhost").get("/v1/models", headers=headers).status_code == 200
    assert client.get("/").headers["content-security-policy"] == "frame-ancestors 'none'"


def test_reported_validation_errors_are_limited():
    """Only the first of many mistakes is reported; reporting all takes seconds, in which nothing else runs."""
    messages = [{"role": "user", "content": [{f"x{i}": 1 for i in range(60)}] * 60}] * 1000
    with pytest.raises(ValidationError) as error:
        ChatBody.model_validate(CHAT | {"messages": messages})
    assert error.value.error_count() <= 64


@pytest.mark.parametrize(
    "schema", [{"type": "string", "minLength": "é" * 60}, {"$ref": "#"}, {"type": "string", "pattern": "(" * 3}]
)
def test_parser_internals_are_not_exposed(server, schema):
    """The error message reveals neither the parser's state nor that the parser has failed."""
    with pytest.raises(ValueError, match=r"The schema cannot be used: .") as error:
        server._served.grammars.json_schema(schema)
    assert not any(word in str(error.value) for word in ("panic", "<state>", "<backtrace>", "unknown>"))


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda part: st.lists(part) | st.dictionaries(st.text(), part),
    )
)
def test_answer_in_pieces_equals_whole_answer(value):
    for whole in (value, {"choices": [{"logprobs": {"content": [value] * 150}}] * 2, "ids": [1] * 150}):
        assert "".join(dump_pieces(whole)) == dump(whole)


@pytest.mark.parametrize(
    "header",
    [None, "", "secret", "Bearer", "Bearer other", "Bearer secret2", "Basic secret", "Bearer ÿ".encode("latin-1")],
)
def test_invalid_api_keys_are_rejected(server, header):
    guarded = Server(server._served.engine, servers.tokenizer(), servers.NAME, api_key="secret")
    client = client_of(guarded)
    headers = {} if header is None else {"Authorization": header}
    for answer in (
        client.post("/v1/completions", json=TEXT, headers=headers),
        client.get("/v1/models", headers=headers),
    ):
        assert refused(answer, 401)["code"] == "invalid_api_key"
    assert client.get("/health").status_code == client.get("/metrics").status_code == client.get("/").status_code == 200
    right = {"Authorization": "bearer secret"}
    assert client.get("/v1/models", headers=right).status_code == 200
    refused(client.post("/v1/completions", json={}, headers=right), 400)


def test_template_errors_are_client_errors(server):
    words = servers.tokenizer()
    for template, said in (
        ("{{ raise_exception('no ' + messages[0].content) }}", "no x"),
        ("{{ messages[0].content / 0 }}", "template"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[7].content.nothing }}", "template"),
        (None, "no chat template"),
    ):
        words.chat_template = template
        client = client_of(Server(server._served.engine, words, servers.NAME))
        assert said in refused(client.post("/v1/chat/completions", json=CHAT), 400)["message"]


def test_internal_errors_reveal_no_details(server, client, monkeypatch):
    monkeypatch.setattr("jspec.serve.app.number_of_choices", lambda _: {}["secret"])
    error = refused(client.post("/v1/completions", json=TEXT), 500)
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 4_000_000, b"[" + b"[]," * 1_000_000 + b"[]]", b"[" + b"1," * 2_000_000 + b"1]"),
        *(b'{"a":' * 70_000, b"9" * 4_000_000),
    ],
    ids=("brackets", "lists", "numbers", "objects", "digits"),
)
def test_bodies_of_many_small_values_do_not_block_server(running, body):
    begun = time.monotonic()
    answer = httpx.post(f"{running.url}/v1/completions", content=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("The body ")
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize("value", ["1e999", "-1e999", "[" * 950 + "]" * 950, '{"a":' * 950 + "1" + "}" * 950])
@pytest.mark.parametrize("path", ["responses", "chat/completions", "completions"])
def test_values_that_no_response_could_repeat_are_rejected(client, path, value):
    """JSON has no infinite numbers, and a response has less room for nested values than the body."""
    body = f'{{"model": "{servers.NAME}", "input": "x", "tools": [{{"type": "function", "name": {value}}}]}}'
    assert refused(client.post(f"/v1/{path}", content=body), 400)["message"].startswith(
        ("The body contains ", "The body is nested")
    )
