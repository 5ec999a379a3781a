"""Bodies that cannot be served: the right status, one sentence in OpenAI's shape, and nothing computed."""

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
from jspec.serve.schemas import ChatBody
from jspec.serve.sse import dump, dump_pieces
from support import servers

pytestmark = pytest.mark.usefixtures("quick_compile")
TEXT, CHAT = (
    {"model": servers.NAME, "prompt": "the"},
    {"model": servers.NAME, "messages": [{"role": "user", "content": "x"}]},
)
HUGE = 10**30
NUMBERS = {  # what is not one of these, by field
    "max_tokens": ["4", 1.5, True, -1, HUGE, [1], {}],
    "temperature": ["1", -0.1, 101, True, [], 1e300],
    "top_p": ["1", 0, -1, 1.1, {}],
    "top_k": ["1", -2, 1.5, HUGE],
    "min_p": ["0", -0.1, 1.1],
    "presence_penalty": ["0", -2.1, 2.1],
    "frequency_penalty": ["0", -2.1, 2.1],
    "repetition_penalty": ["1", 0, -1, 101],
    "seed": ["1", -1, 2**32, 1.5, True],
    "n": ["1", 0, -1, 1.5, 129, HUGE],
    "min_tokens": ["1", -1, 17],
    "stop": ["", [""], 1, [1], ["a", None], {"a": 1}, ["a"] * 17, ["a" * 1001]],
    "stop_token_ids": [1, ["a"], [-1], [1.5], [True], [261], [HUGE], [*range(1, 9)], [1] * 65],
    "logit_bias": [[], {"a": 1}, {"1": "x"}, {"1": 101}, {"261": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"²": 1},
                   {"1" * 40: 1}],
    "stream": ["true", 1],
    "stream_options": [1, {"include_usage": True}, {"other": True}],
    "ignore_eos": ["yes", 1],
    "user": [1, ["me"]],
    "cache_salt": [1, "x" * 257],
    "model": [1, [], {}],
    "return_token_ids": [1],
    "response_format": ["json", {}, {"type": "owl"}, {"type": "json_schema"}, {"type": "regex"},
                        {"type": "text", "regex": "a"}, {"type": "regex", "regex": "[a"},
                        {"type": "regex", "regex": 1}, {"type": "json_object", "a": 1},
                        {"type": "json_schema", "json_schema": {"name": "x"}},
                        {"type": "json_schema", "json_schema": {"schema": {"type": "owl"}}},
                        {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://x/y"}}},
                        {"type": "json_schema", "json_schema": {"schema": [1]}}],
}  # fmt: skip
OF_TEXTS = {
    "prompt": ["", [], [[]], 1, {}, [1, "a"], ["a", 1], [[1], "a"], [1.5], [True], [-1], [261], [HUGE], [[1], [261]],
               "x" * 500, [1] * 200, [["a"]], [None], ["a", ""], "\ud800", ["a"] * 50],
    "logprobs": [-1, 21, True, "1", 1.5],
    "best_of": [2, 0, "1"],
    "suffix": ["end"],
    "echo": [1, "yes"],
    "messages": [[{"role": "user", "content": "x"}]],
    "\ud800": [1],
}  # fmt: skip
OF_CHATS = {
    "messages": [[], "x", {}, [1], ["x"], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}],
                 [{"role": "user", "content": 1}], [{"role": "user", "content": [1]}],
                 [{"role": "owl", "content": "x"}],
                 [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
                 [{"role": "user", "content": "x", "tool_calls": [1]}], [{"role": "assistant", "content": "x"}],
                 [{"role": "user", "content": "x" * 500}], [{"role": "user", "content": "\ud800"}], [[]],
                 [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]],
    "logprobs": [1, "true"],
    "top_logprobs": [1, -1, 21, True],
    "max_completion_tokens": [0, -1, "1", HUGE],
    "tools": [[{"type": "function"}], []],
    "tool_choice": ["auto"],
    "functions": [[]],
    "modalities": [["audio"]],
    "prompt": ["x"],
    "chat_template": ["x"],
}  # fmt: skip
TOGETHER = [
    {"max_tokens": 0}, {"max_tokens": 5, "min_tokens": 6}, {"stream_options": {"include_usage": True}},
    {"max_tokens": 128}, {"prompt": ["a", "b", "c"], "n": 3}, {"stream": True, "prompt": "x" * 500},
    {"stream": True, "stream_options": {"x": 1}}, {str(i): 1 for i in range(70_000)},
    {"logit_bias": {str(i): "x" for i in range(70_000)}}, {"response_format": {str(i): 1 for i in range(70_000)}},
]  # fmt: skip
RAW = [
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b'{"model": "tiny", "prompt": "\xff"}', b'{"a": NaN}',
    b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    b"[" * 100_000, b'{"a":' * 100_000, b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"1" * 5000,
    b'{"model": "tiny", "prompt": "x", "seed": ' + b"1" * 5000 + b"}", b'{"model": "tiny"} {}',
    b"model=tiny", b'{"model": "tiny", "prompt": "\\ud800"}', b"\x00" * 10, b'\xef\xbb\xbf{"model": "tiny"}',
]  # fmt: skip


def bodies():
    for path, usual, tables in (
        ("completions", TEXT, (NUMBERS, OF_TEXTS)),
        ("chat/completions", CHAT, (NUMBERS, OF_CHATS)),
    ):
        for name, value in ((name, value) for table in tables for name, values in table.items() for value in values):
            if (path, name, value) != ("chat/completions", "min_tokens", 17):  # chats have no limit of 16
                yield path, json.dumps(usual | {name: value}).encode(), name
        yield path, json.dumps(usual | {"unheard_of": 1}).encode(), "unheard_of"
        for messages in (
            [1] * 200_000,
            [{"role": "user", "content": [1] * 200_000}],
            [{str(i): 1 for i in range(70_000)}],
        ):
            yield path, json.dumps(CHAT | {"messages": messages}).encode(), None
        yield path, json.dumps({}).encode(), "model"
        yield path, json.dumps({"model": servers.NAME}).encode(), "messages" if "chat" in path else "prompt"
    yield from (("completions", json.dumps(TEXT | fields).encode(), None) for fields in TOGETHER)
    yield from (("completions", raw, None) for raw in RAW)


@pytest.fixture(scope="module")
def server(sources):
    """On an engine that cannot be asked for anything."""
    target, draft = (jspec.load(folder) for folder in sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "compile", lambda _: None)
        patch.setattr("jspec.engine.engine.warm_up", lambda *_: None)
        patch.setattr(Engine, "_queue", lambda *_: pytest.fail("something was computed"))
        with Engine(target, draft, **servers.OPTIONS) as engine:
            yield Server(engine, servers.tokenizer(), servers.NAME, max_waiting=servers.WAITING, max_body=2**20)


@pytest.fixture(scope="module")
def client(server):
    return TestClient(server.app, raise_server_exceptions=False, base_url="http://localhost")


def refused(answer, status):
    """The error of an answer, which is as it should be."""
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    message = error["message"]
    assert message and "\n" not in message and message.endswith(".") and len(message) < 400, message
    assert not any(word in message for word in ("Traceback", "pydantic", "Error:", "{place}", "__", "Value error"))
    return error


def test_bad_bodies(client, server, report):
    cases = [*bodies()]
    assert len(cases) >= 120
    for path, body, name in cases:
        answer = client.post(f"/v1/{path}", content=body)
        assert answer.status_code == 400, (path, body[:200], answer.text)
        error = refused(answer, 400)
        if name is not None and name.isascii():
            assert name in error["message"] or name in ("prompt", "messages"), (body[:200], error)
            assert (error["param"] or name).startswith(name), (body[:200], error)
        assert server.open == 0
    report(bodies=len(cases))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": -1}, "temperature is -1; expected a number greater than or equal to 0."),
        ({"top_k": "many"}, "top_k is 'many'; expected a valid integer."),
        ({"foo": 1}, "foo is not a field that this server knows; leave it out."),
        ({"suffix": "x"}, "suffix is not supported by this server; leave it out."),
        ({"best_of": 3, "n": 2}, "best_of must be n, for no choice is thrown away; leave it out."),
        ({"prompt": "x" * 120}, "The prompt and max_tokens are 120 and 16 tokens, and texts have at most 128 tokens "
                                "here; shorten one of the two."),
        ({"max_tokens": 200}, "The prompt and max_tokens are 1 and 200 tokens, and texts have at most 128 tokens "
                              "here; shorten one of the two."),
        ({"stream_options": 1}, "stream_options is 1; expected an object."),
        ({"stop": ["a"] * 17}, "stop should have at most 16 items, not 17."),
        ({"user": "\ud800"}, "The body has '\\ud800', which is half a character."),
        ({"prompt": "x" * 10**5}, "There are 100000 characters in prompt, and texts have at most 128 tokens here; "
                                  "shorten it."),
        ({"temperature": float("nan")}, "The body is no JSON that can be read: NaN is no number of JSON."),
        ({"prompt": [261]}, "prompt holds the id 261, outside the vocabulary of 261 tokens."),
        ({"stop_token_ids": [300]}, "stop_token_ids holds 300, outside the vocabulary of 261 tokens."),
        ({"prompt": [1] * 128}, "There are 128 tokens in prompt, and texts have at most 128 tokens here; shorten it."),
        ({"temperature": {str(i): 1 for i in range(60)}}, "temperature is {...}; expected a valid number."),
        ({"response_format": {"type": "regex"}}, "in response_format regex goes with type 'regex', and with no other."),
        ({"response_format": {"type": "owl"}}, "response_format.type is 'owl'; expected 'text', 'json_object', "
                                               "'json_schema' or 'regex'."),
        ({"n": 100}, "The request has 100 choices in all, and the server takes 8; send fewer."),
    ],
)  # fmt: skip
def test_sentences(client, fields, sentence):
    body = json.dumps(TEXT | fields)
    assert refused(client.post("/v1/completions", content=body), 400)["message"] == sentence


def test_nulls_are_as_good_as_nothing(client):
    """Clients send them: so these fail for their last field alone."""
    nulls = dict.fromkeys(("suffix", "tools", "stop", "seed", "logit_bias", "max_tokens", "best_of", "user"))
    answer = client.post("/v1/completions", json=TEXT | nulls | {"temperature": -1})
    assert "temperature" in refused(answer, 400)["message"]


def test_other_mistakes(client):
    assert refused(client.post("/v1/completions", json=TEXT | {"model": "gpt-4"}), 404)["code"] == "model_not_found"
    assert refused(client.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    refused(client.get("/v1/completions"), 405)
    refused(client.post("/v1/completions/", json=TEXT), 404)
    refused(client.post("/v1/completions", json=TEXT | {"model": "\x7f" * 10**5}), 404)
    assert len(refused(client.post("/v1/completions", json=TEXT | {"x" * 10**5: 1}), 400)["param"]) <= 300
    refused(client.post("/health"), 405)
    refused(client.get("/v1/embeddings"), 404)
    error = refused(client.post("/v1/completions", content=b" " * (2**20 + 1)), 413)
    assert error["code"] == "body_too_long"


def test_pages_of_other_sites_need_a_key(server, client):
    """A browser says where they are from, and sends what they like, though they may not read the answer."""
    for site, status in (("cross-site", 403), ("same-origin", 400), ("none", 400)):
        answer = client.post("/v1/completions", content=b"{}", headers={"Sec-Fetch-Site": site})
        assert answer.status_code == status
    guarded = Server(server._served.engine, servers.tokenizer(), servers.NAME, api_key="secret")
    headers = {"Sec-Fetch-Site": "cross-site", "Authorization": "Bearer secret"}
    assert TestClient(guarded.app, base_url="http://localhost").get("/v1/models", headers=headers).status_code == 200
    assert client.get("/").headers["content-security-policy"] == "frame-ancestors 'none'"


def test_many_mistakes_are_not_told_one_by_one():
    """Of which only the first is; telling them takes seconds, in which nothing else runs."""
    messages = [{"role": "user", "content": [{f"x{i}": 1 for i in range(60)}] * 60}] * 1000
    with pytest.raises(ValidationError) as error:
        ChatBody.model_validate(CHAT | {"messages": messages})
    assert error.value.error_count() <= 64


@pytest.mark.parametrize(
    "schema", [{"type": "string", "minLength": "é" * 60}, {"$ref": "#"}, {"type": "string", "pattern": "(" * 3}]
)
def test_what_the_parser_says_is_not_passed_on_whole(server, schema):
    """Neither its state nor that it has failed."""
    with pytest.raises(ValueError, match=r"The schema cannot be used: .") as error:
        server._served.grammars.json_schema(schema)
    assert not any(word in str(error.value) for word in ("panic", "<state>", "<backtrace>", "unknown>"))


@settings(deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False,
                    allow_infinity=False), lambda part: st.lists(part) | st.dictionaries(st.text(), part)))  # fmt: skip
def test_an_answer_in_pieces_is_the_answer(value):
    for whole in (value, {"choices": [{"logprobs": {"content": [value] * 150}}] * 2, "ids": [1] * 150}):
        assert "".join(dump_pieces(whole)) == dump(whole)


@pytest.mark.parametrize(
    "header",
    [None, "", "secret", "Bearer", "Bearer other", "Bearer secret2", "Basic secret", "Bearer ÿ".encode("latin-1")],
)
def test_keys(server, header):
    guarded = Server(server._served.engine, servers.tokenizer(), servers.NAME, api_key="secret")
    client = TestClient(guarded.app, raise_server_exceptions=False, base_url="http://localhost")
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


def test_what_a_template_refuses(server):
    words = servers.tokenizer()
    for template, said in (
        ("{{ raise_exception('no ' + messages[0].content) }}", "no x"),
        ("{{ messages[0].content / 0 }}", "template"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[7].content.nothing }}", "template"),
        (None, "no chat template"),
    ):
        words.chat_template = template
        client = TestClient(
            Server(server._served.engine, words, servers.NAME).app,
            raise_server_exceptions=False,
            base_url="http://localhost",
        )
        assert said in refused(client.post("/v1/chat/completions", json=CHAT), 400)["message"]


def test_bugs_are_nobody_else_s_business(server, client, monkeypatch):
    monkeypatch.setattr("jspec.serve.app.number_of_choices", lambda _: {}["secret"])
    error = refused(client.post("/v1/completions", json=TEXT), 500)
    assert "secret" not in error["message"]


@pytest.mark.parametrize("body", [
    b"[" * 4_000_000, b"[" + b"[]," * 1_000_000 + b"[]]", b"[" + b"1," * 2_000_000 + b"1]", b'{"a":' * 70_000,
    b"9" * 4_000_000,
], ids=("brackets", "lists", "numbers", "objects", "digits"))  # fmt: skip
def test_bodies_of_many_small_things_hold_nobody_up(running, body):
    begun = time.monotonic()
    answer = httpx.post(f"{running.url}/v1/completions", content=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("The body ")
    assert time.monotonic() - begun < 60
