"""OpenAI's own client: chat, completions, responses, structured output and tools."""

import json
from typing import Any

from checks import BEGINNING, MOST_TOKENS, QUESTION, TOOL_QUESTION, Program
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

program = Program("openai")
api = OpenAI(base_url=f"{program.url}/v1", api_key="none")
model = program.model
messages: Any = [{"role": "user", "content": QUESTION}]
tool_messages: Any = [{"role": "user", "content": TOOL_QUESTION}]


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


class GetWeather(BaseModel):
    """Get the weather forecast of a city."""

    city: str
    days: int


schema = GetWeather.model_json_schema()
tool: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": schema}}


def is_weather(arguments: str) -> bool:
    """Return whether these are the tool's arguments, with the right types."""
    found = json.loads(arguments)
    return isinstance(found["city"], str) and isinstance(found["days"], int) and len(found) == 2


@program.check("models")
def _() -> None:
    assert model in [one.id for one in api.models.list()]
    assert api.models.retrieve(model).id == model


@program.check("chat, whole and streamed alike")
def _() -> None:
    fields: Any = {"model": model, "messages": messages, "temperature": 0, "max_completion_tokens": 24}
    whole = api.chat.completions.create(**fields)
    chunks = [*api.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text and text == whole.choices[0].message.content
    assert chunks[-1].usage and whole.usage and chunks[-1].usage.total_tokens == whole.usage.total_tokens


@program.check("completions, whole and streamed alike")
def _() -> None:
    fields: Any = {"model": model, "prompt": BEGINNING, "temperature": 0, "max_tokens": 24}
    whole = api.completions.create(**fields).choices[0].text
    assert whole and whole == "".join(part.choices[0].text for part in api.completions.create(**fields, stream=True))


@program.check("chat.completions.parse")
def _() -> None:
    found = api.chat.completions.parse(model=model, messages=messages, response_format=City, temperature=0)
    assert isinstance(found.choices[0].message.parsed, City)


@program.check("chat.completions.stream with a format")
def _() -> None:
    with api.chat.completions.stream(model=model, messages=messages, response_format=City, temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)
    assert {"content.delta", "content.done"} <= kinds


@program.check("tools")
def _() -> None:
    found = api.chat.completions.create(
        model=model, messages=tool_messages, tools=[tool], tool_choice="required", max_completion_tokens=MOST_TOKENS
    )
    (choice,) = found.choices
    call, *_ = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather" and is_weather(call.function.arguments)


@program.check("tools, tool_choice auto")
def _() -> None:
    found = api.chat.completions.create(model=model, messages=tool_messages, tools=[tool], max_completion_tokens=64)
    assert found.choices[0].message.content or found.choices[0].message.tool_calls


@program.check("tools, a conversation with a result")
def _() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."}
    whole = [*tool_messages, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    found = api.chat.completions.create(
        model=model, messages=whole, tools=[tool], tool_choice="none", max_completion_tokens=24
    )
    assert found.choices[0].message.content and not found.choices[0].message.tool_calls


@program.check("tools, streamed and parsed")
def _() -> None:
    named: Any = {"type": "function", "function": {"name": "GetWeather"}}
    tools = [pydantic_function_tool(GetWeather)]
    with api.chat.completions.stream(
        model=model, messages=tool_messages, tools=tools, tool_choice=named, parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetWeather)
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


@program.check("responses, whole and streamed alike")
def _() -> None:
    fields: Any = {"model": model, "input": QUESTION, "instructions": "Be brief.", "temperature": 0}
    whole = api.responses.create(**fields, max_output_tokens=24)
    events = [*api.responses.create(**fields, max_output_tokens=24, stream=True)]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text and text == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == text
    assert [event.sequence_number for event in events] == [*range(len(events))]


@program.check("responses.parse")
def _() -> None:
    found = api.responses.parse(model=model, input=messages, text_format=City, temperature=0)
    assert isinstance(found.output_parsed, City)


@program.check("responses, a tool and its result")
def _() -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": schema, "strict": False}]
    found = api.responses.create(
        model=model, input=tool_messages, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    (call,) = (item for item in found.output if item.type == "function_call")
    assert call.name == "get_weather" and is_weather(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    later: Any = [*tool_messages, *(item.model_dump() for item in found.output), result]
    answer = api.responses.create(model=model, input=later, tools=tools, tool_choice="none", max_output_tokens=24)
    assert answer.output_text


@program.check("responses.stream with a tool")
def _() -> None:
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": schema, "strict": False}]
    with api.responses.stream(
        model=model, input=tool_messages, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    ) as stream:
        kinds = {event.type for event in stream}
        (call,) = (item for item in stream.get_final_response().output if item.type == "function_call")
    assert is_weather(call.arguments)
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds


program.end()
