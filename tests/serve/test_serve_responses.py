"""The Responses API: OpenAI's types and client, streams equal to whole responses, calls, and rejected requests."""

import json

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from jspec.serve.errors import Refusal
from jspec.serve.response_items import Item, output_items
from jspec.serve.responses_schemas import ResponsesBody, as_chat
from jspec.serve.tools.hermes import Hermes
from jspec.serve.tools.llama3 import Llama3
from jspec.serve.validation import validated
from support import servers
from support.scripted import script
from support.servers import HELLO

pytestmark = pytest.mark.usefixtures("quick_compile")
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
LOGPROBS = ["message.output_text.logprobs"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("f", "g")]
CALL = {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}", "status": "completed"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "sunny"}
ASSISTANT = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "so", "annotations": [], "logprobs": []}],
}


def written(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


FIRST, SECOND, THIRD = written("f", '{"a": 1}'), written("g", '{"a": 22}'), written("f", "{}")
MIXED = f"Let us see.\n{FIRST}\n and now {SECOND}\n{THIRD}\n"
ITEMS = [Item("Let us see."), Item('{"a": 1}', "f"), Item("and now"), Item('{"a": 22}', "g"), Item("{}", "f")]


def body(**fields):
    return {"model": servers.NAME, "input": "the thing", "max_output_tokens": 12, "seed": 5} | fields


def post(running, **fields):
    """Return a response, which must fit OpenAI's types."""
    answer = httpx.post(f"{running.url}/v1/responses", json=body(**fields), timeout=60)
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def streamed(running, **fields):
    """Return the events of a stream, which must fit OpenAI's types and be numbered."""
    answer = httpx.post(f"{running.url}/v1/responses", json=body(stream=True, **fields), timeout=60)
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    events = [json.loads(lines[-1].removeprefix("data: ")) for lines in blocks]
    for i, (event, lines) in enumerate(zip(events, blocks, strict=True)):
        assert lines == [f"event: {event['type']}", lines[-1]]
        EVENT.validate_python(event)
        assert event["sequence_number"] == i
    return events


def as_items(output):
    return [
        Item(item["arguments"], item["name"]) if item["type"] == "function_call" else Item(item["content"][0]["text"])
        for item in output
    ]


def stable(response):
    """Return a response without ids, times and counts that depend on earlier requests."""
    output = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    usage = {name: response["usage"][name] for name in ("input_tokens", "output_tokens", "total_tokens")}
    return response | {"id": "", "created_at": 0, "output": output, "usage": usage}


def check_events(events):
    """Check that the events build the items of the last one, in OpenAI's order."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    final, at = events[-1]["response"], 2
    assert events[-1]["type"] == f"response.{final['status']}"
    for i, item in enumerate(final["output"]):
        is_call = item["type"] == "function_call"
        kind = "function_call_arguments" if is_call else "output_text"
        added, at = events[at], at + 1
        assert added["type"] == "response.output_item.added" and added["item"]["status"] == "in_progress"
        assert added["item"]["id"] == item["id"] and added["item"].get("call_id") == item.get("call_id")
        if not is_call:
            assert events[at]["type"] == "response.content_part.added" and added["item"]["content"] == []
            at += 1
        text, logprobs = "", []
        while events[at]["type"] == f"response.{kind}.delta":
            text, logprobs = text + events[at]["delta"], logprobs + events[at].get("logprobs", [])
            assert events[at]["delta"] or events[at].get("logprobs")
            at += 1
        done, at = events[at], at + 1
        assert done["type"] == f"response.{kind}.done" and done["item_id"] == item["id"]
        if is_call:
            assert text == done["arguments"] == item["arguments"]
        else:
            (part,) = item["content"]
            assert events[at]["type"] == "response.content_part.done" and events[at]["part"] == part
            assert text == done["text"] == part["text"] and logprobs == done["logprobs"] == part["logprobs"]
            at += 1
        assert events[at]["type"] == "response.output_item.done" and events[at]["item"] == item
        assert {event["output_index"] for event in (added, done, events[at])} == {i}
        at += 1
    assert at == len(events) - 1


KINDS = {
    "plain": {},
    "greedy": {"temperature": 0, "instructions": "in a"},
    "logprobs": {"include": LOGPROBS, "top_logprobs": 2},
    "stop": {"stop": ["a", "e"], "max_output_tokens": 60},
    "extensions": {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "logit_bias": {"0": -100},
        "metadata": {"a": "b"},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_stream_builds_the_whole_response(running, kind):
    events = streamed(running, **KINDS[kind])
    check_events(events)
    assert stable(events[-1]["response"]) == stable(post(running, **KINDS[kind]))


def test_text_is_that_of_the_chat(running, chat):
    whole = post(running)
    expected = chat()
    assert as_items(whole["output"]) == [Item(expected.choices[0].message.content)]
    assert whole["usage"]["input_tokens"] == expected.usage.prompt_tokens
    assert whole["usage"]["output_tokens"] == expected.usage.completion_tokens == 12
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["output"][0]["status"] == "incomplete"
    assert whole["usage"]["jspec"]["drafted"] > 0 and whole["store"] is False


def test_instructions_are_a_system_message(running, chat):
    expected = chat(messages=[{"role": "system", "content": "in a"}, *HELLO]).choices[0].message.content
    assert as_items(post(running, instructions="in a")["output"]) == [Item(expected)]
    developer = [{"role": "developer", "content": [{"type": "input_text", "text": "in a"}]}, *HELLO]
    assert as_items(post(running, input=developer)["output"]) == [Item(expected)]


def test_logprobs_are_those_of_the_chat(running, chat):
    expected = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    (part,) = post(running, include=LOGPROBS, top_logprobs=2)["output"][0]["content"]
    assert part["logprobs"] == [one.model_dump() for one in expected] and len(expected) == 12


def test_format_is_enforced(running):
    text_format = {"type": "json_schema", "name": "x", "schema": {"enum": [17]}, "strict": True}
    whole = post(running, text={"format": text_format, "verbosity": "low"}, max_output_tokens=40)
    assert as_items(whole["output"]) == [Item("17")] and whole["status"] == "completed"
    assert whole["text"]["format"] == text_format | {"description": ""}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_and_messages_are_items_in_order(running, monkeypatch, size):
    script(monkeypatch, running, MIXED, size=size)
    fields = {"tools": TOOLS, "max_output_tokens": None, "input": "x"}
    whole = post(running, **fields)
    assert as_items(whole["output"]) == ITEMS and whole["status"] == "completed"
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert len({item["call_id"] for item in whole["output"] if "call_id" in item}) == 3
    assert [tool["name"] for tool in whole["tools"]] == ["f", "g"]
    events = streamed(running, **fields)
    check_events(events)
    assert stable(events[-1]["response"]) == stable(whole)


def test_items_only_grow():
    """Items that a client has received never change: every prefix of an output gives a prefix of the items."""
    for form, text in ((Hermes(), MIXED), (Llama3(), '{"name": "f", "parameters": {"a": 1}}; {"name": "g"')):
        whole = output_items(form.parse(text, {"f", "g"}, is_complete=True))
        before = []
        for length in range(len(text)):
            items = output_items(form.parse(text[:length], {"f", "g"}, is_complete=False))
            assert items[: len(before) - 1] == before[:-1] and len(items) >= len(before)
            assert not before or items[len(before) - 1].text.startswith(before[-1].text)
            before = items
        assert [item.function for item in whole[: len(before)]] == [item.function for item in before]


@pytest.mark.parametrize(("end", "status"), [("length", "incomplete"), ("eos", "completed")])
def test_only_the_last_item_is_incomplete(running, monkeypatch, end, status):
    script(monkeypatch, running, MIXED[: MIXED.index("22}") + 1], end=end)
    events = streamed(running, tools=TOOLS, max_output_tokens=None, input="x")
    check_events(events)
    output = events[-1]["response"]["output"]
    assert as_items(output) == [*ITEMS[:3], Item('{"a": 2', "g")]
    assert [item["status"] for item in output] == ["completed"] * 3 + [status]


def test_output_without_text_is_an_empty_message(running, monkeypatch):
    script(monkeypatch, running, "")
    for fields in ({}, {"tools": TOOLS}):
        whole = post(running, input="x", **fields)
        assert as_items(whole["output"]) == [Item("")] and whole["status"] == "completed"
        check_events(streamed(running, input="x", **fields))


def test_openai_client_accumulates_a_stream(running, monkeypatch):
    script(monkeypatch, running, MIXED)
    request = {"model": servers.NAME, "input": "x", "tools": TOOLS}
    with running.usual.responses.stream(**request) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert as_items(final.model_dump()["output"]) == ITEMS and kinds[-1] == "response.completed"
    assert final.output_text == "Let us see.and now"


def test_openai_client_parses_a_format(running, monkeypatch):
    class Answer(pydantic.BaseModel):
        a: int

    script(monkeypatch, running, '{"a": 1}')
    monkeypatch.setattr("jspec.serve.app.output_constraint", lambda served, body: None)
    request = {"model": servers.NAME, "input": "x", "text_format": Answer}
    assert running.usual.responses.parse(**request).output_parsed == Answer(a=1)


def test_failure_is_an_exception_in_the_client(running, monkeypatch):
    script(monkeypatch, running, "abc", end="error")
    events = streamed(running)
    assert [events[0]["type"], events[-1]["type"]] == ["response.created", "error"]
    assert events[-1]["code"] == events[-1]["error"]["code"] == "engine_failed"
    assert events[-1]["message"].endswith(".")
    with pytest.raises(openai.APIError, match="The engine failed"):
        list(running.usual.responses.create(model=servers.NAME, input="x", stream=True))
    with pytest.raises(openai.InternalServerError, match="The engine failed"):
        running.usual.responses.create(model=servers.NAME, input="x")


def test_late_errors_name_the_fields_of_this_api(running, monkeypatch):
    script(monkeypatch, running, "abc", end="error", error_code="constraint_too_complex")
    fields = {"text": {"format": {"type": "json_object"}}}
    monkeypatch.setattr("jspec.serve.app.output_constraint", lambda served, body: None)
    answer = httpx.post(f"{running.url}/v1/responses", json=body(**fields))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "text.format"
    assert streamed(running, **fields)[-1]["param"] == "text.format"


def test_responses_are_not_kept(running):
    found = post(running)
    client = running.usual.responses
    for use in (client.retrieve, client.delete, client.cancel, client.input_items.list):
        with pytest.raises(openai.NotFoundError, match="This server stores no responses"):
            use(found["id"])


def messages(**fields):
    """Return the messages of the chat that a body becomes, as a template receives them."""
    chat = as_chat(validated(ResponsesBody, body(**fields)))
    assert (chat.max_tokens, chat.seed) == (12, 5)
    return [message.plain() for message in chat.messages]


def test_items_become_the_messages_of_a_chat():
    """A call joins the assistant message before it, so that the template renders what the model wrote."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"role": "tool", "content": "sunny", "tool_call_id": "a"}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    found = messages(input=[*HELLO, reasoning, ASSISTANT, reasoning, CALL, CALL | {"call_id": "b"}, RESULT])
    both = {"role": "assistant", "content": "so", "tool_calls": [call, call | {"id": "b"}]}
    assert found == [*HELLO, both, tool]
    parts = [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]
    found = messages(input=[*HELLO, CALL, RESULT | {"output": parts}, ASSISTANT], instructions="in a")
    assert found == [
        {"role": "system", "content": "in a"},
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        tool,
        {"role": "assistant", "content": "so"},
    ]
    refusal = ASSISTANT | {"content": [{"type": "refusal", "refusal": "no"}]}
    assert messages(input=[*HELLO, refusal])[-1] == {"role": "assistant", "content": "no"}


CLIENTS = {  # request bodies of clients with their defaults, without the model
    "instructor": {
        "input": HELLO,
        "text": {"format": {"type": "json_schema", "name": "City", "strict": True, "schema": SCHEMA}},
        "tool_choice": {"type": "function", "name": "City"},
        "tools": [{"type": "function", "name": "City", "parameters": SCHEMA, "description": "A city."}],
    },
    "langchain": {"stream": False, "input": [{"content": "x", "role": "user", "type": "message"}]},
    "litellm": {"input": "x", "max_output_tokens": 24},
    "openai-agents": {
        "include": [],
        "input": [*HELLO, CALL, RESULT],
        "instructions": "Be brief.",
        "parallel_tool_calls": False,
        "tool_choice": "required",
        "tools": [TOOLS[0] | {"strict": True, "description": ""}],
    },
    "openai": {
        "input": [*HELLO, CALL | {"async_": None, "caller": None, "namespace": None}, RESULT],
        "tool_choice": "none",
        "tools": TOOLS,
        "temperature": 0,
    },
    "codex": {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "tools": [TOOLS[0]],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "text": {"verbosity": "low"},
    },
    "nulls": dict.fromkeys(
        ("background", "conversation", "previous_response_id", "prompt", "text", "tools", "truncation", "metadata")
    )
    | {"input": "x"},
}


@pytest.mark.parametrize("client", CLIENTS)
def test_bodies_of_clients_are_accepted(client):
    chat = as_chat(validated(ResponsesBody, {"model": "m"} | CLIENTS[client]))
    assert chat.messages and chat.stream == CLIENTS[client].get("stream", False)


def test_functions_are_strict_by_default():
    def strict(**fields):
        tool = {"type": "function", "name": "f", "parameters": SCHEMA}
        (found,) = as_chat(validated(ResponsesBody, body(tools=[tool | fields]))).tools
        return found.function.strict

    assert strict() and strict(strict=None) and strict(strict=True) and not strict(strict=False)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"previous_response_id": "resp_1"},
            "previous_response_id is not supported by this server; responses are not stored, so send the whole "
            "conversation as input.",
        ),
        ({"input": [*HELLO, *[{"role": "owl", "content": "x"}]]}, "input[1].role is 'owl'; expected 'system', "),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type is 'input_im"),
        ({"input": [*HELLO, CALL, RESULT | {"call_id": "b"}]}, "input[2] is the output of the call 'b', but no "),
        ({"tools": [{"type": "web_search"}]}, "tools[0] has the type 'web_search', but this server cannot run "),
        ({"tools": [*TOOLS, *TOOLS]}, "tools has two functions named 'f'; give each function its own name."),
        (
            {"tools": TOOLS, "ignore_eos": True, "tool_choice": "required"},
            "constrained calls determine the output's end; ",
        ),
        ({"input": [CALL] * 129}, "a series of calls in input should have at most 128 items, not 129."),
        ({"min_tokens": 13}, "min_tokens is greater than max_output_tokens; reduce min_tokens."),
        ({"max_tokens": 4}, "max_tokens is not a field that this server supports; omit this field."),
        ({"top_logprobs": 2}, "top_logprobs requires 'message.output_text.logprobs' in include; add this value."),
        ({"ignore_eos": True, "text": {"format": {"type": "json_object"}}}, "text.format determines where the output"),
    ],
)
def test_errors_name_the_fields_of_this_api(fields, sentence):
    with pytest.raises(Refusal) as caught:
        as_chat(validated(ResponsesBody, body(**fields)))
    assert caught.value.message.startswith(sentence)
    assert (caught.value.param or "").startswith(tuple(fields))
