"""The Responses API: OpenAI's types and client, streams equal to whole responses, and calls."""

import json

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from jspec.serve.response_items import Item, output_items
from jspec.serve.tools.hermes import Hermes
from jspec.serve.tools.llama3 import Llama3
from support import servers
from support.response_bodies import LOGPROBS, TOOLS, body
from support.scripted import script
from support.servers import HELLO

pytestmark = pytest.mark.usefixtures("quick_compile")
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def written(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


FIRST, SECOND, THIRD = written("f", '{"a": 1}'), written("g", '{"a": 22}'), written("f", "{}")
MIXED = f"Let us see.\n{FIRST}\n and now {SECOND}\n{THIRD}\n"
ITEMS = [Item("Let us see."), Item('{"a": 1}', "f"), Item("and now"), Item('{"a": 22}', "g"), Item("{}", "f")]


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
    """A call that was cut off is incomplete, even if the response is not: clients must not run it."""
    script(monkeypatch, running, MIXED[: MIXED.index("22}") + 1], end=end)
    events = streamed(running, tools=TOOLS, max_output_tokens=None, input="x")
    check_events(events)
    output = events[-1]["response"]["output"]
    assert as_items(output) == [*ITEMS[:3], Item('{"a": 2', "g")]
    assert [item["status"] for item in output] == ["completed"] * 3 + ["incomplete"]
    assert events[-1]["response"]["status"] == status


def test_complete_call_is_completed_in_an_incomplete_response(running, monkeypatch):
    script(monkeypatch, running, MIXED[: MIXED.index("1}") + 2], end="length")
    events = streamed(running, tools=TOOLS, max_output_tokens=None, input="x")
    check_events(events)
    response = events[-1]["response"]
    assert as_items(response["output"]) == ITEMS[:2] and response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["completed"] * 2


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
