"""LiteLLM: completion, streams, tools, structured output, text completion and responses."""

import json
from typing import Any

import litellm
from checks import BEGINNING, MOST_TOKENS, QUESTION, TOOL_QUESTION, Program
from pydantic import BaseModel

program = Program("litellm")
where: Any = {"model": f"openai/{program.model}", "api_base": f"{program.url}/v1", "api_key": "none"}
limited: Any = where | {"max_tokens": MOST_TOKENS}
messages = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    """A city."""

    name: str
    is_large: bool


tool = {"type": "function", "function": {"name": "city", "parameters": City.model_json_schema()}}


@program.check("completion, whole and streamed alike")
def _() -> None:
    fields = where | {"messages": messages, "temperature": 0, "max_tokens": 24}
    text = litellm.completion(**fields).choices[0].message.content
    assert text
    assert text == "".join(part.choices[0].delta.content or "" for part in litellm.completion(**fields, stream=True))


@program.check("acompletion")
async def _() -> None:
    found = await litellm.acompletion(**limited, messages=messages)
    assert found.choices[0].message.content


@program.check("tools")
def _() -> None:
    asked = [{"role": "user", "content": TOOL_QUESTION}]
    found = litellm.completion(**limited, messages=asked, tools=[tool], tool_choice="required")
    call, *_ = found.choices[0].message.tool_calls
    assert City.model_validate_json(call.function.arguments, strict=True)


@program.check("tools, streamed")
def _() -> None:
    parts = [*litellm.completion(**limited, messages=messages, tools=[tool], tool_choice="required", stream=True)]
    whole = litellm.stream_chunk_builder(parts)
    assert whole and City.model_validate_json(whole.choices[0].message.tool_calls[0].function.arguments)


@program.check("response_format of a pydantic model")
def _() -> None:
    found = litellm.completion(**limited, messages=messages, response_format=City)
    assert City.model_validate_json(found.choices[0].message.content)


@program.check("response_format json_object")
def _() -> None:
    found = litellm.completion(**limited, messages=messages, response_format={"type": "json_object"})
    assert isinstance(json.loads(found.choices[0].message.content), dict)


@program.check("text_completion")
def _() -> None:
    fields = where | {"model": f"text-completion-openai/{program.model}"}
    found = litellm.text_completion(**fields, prompt=BEGINNING, max_tokens=24)
    assert found.choices[0].text


@program.check("responses, whole and streamed")
def _() -> None:
    found = litellm.responses(**where, input=QUESTION, max_output_tokens=24)
    assert found.output_text
    events: Any = litellm.responses(**where, input=QUESTION, max_output_tokens=24, stream=True)
    assert "response.output_text.delta" in {event.type for event in events}


program.end()
