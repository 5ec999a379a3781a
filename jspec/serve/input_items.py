"""The items of a conversation in the Responses API, and their conversion to chat messages."""

import reprlib
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator

from jspec.core.types import Json
from jspec.serve.fields import MOST_PARTS, Strict, invalid_value, text_parts

STATELESS = "responses are not stored, so send the whole conversation as input"


class TextPart(Strict):
    """A part of a message, or of a function's output."""

    ignored = frozenset({"annotations", "logprobs", "parsed", "cache_control", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text"]
    text: str


_Texts = Annotated[list[TextPart], FailFast(), BeforeValidator(text_parts("input_text")), Field(max_length=MOST_PARTS)]


class InputMessage(Strict):
    """A message of the conversation."""

    ignored = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Texts
    name: str | None = None

    def plain(self) -> dict[str, Json]:
        """Return the chat message."""
        return {"role": self.role, "content": _joined(self.content), "name": self.name}


class FunctionCall(Strict):
    """A function call in an earlier output. The arguments may be incomplete, as in a call that was cut off."""

    ignored = frozenset({"id", "status", "parsed_arguments"})  # the last one is added by OpenAI's client

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    @model_validator(mode="after")
    def _has_arguments(self) -> Self:
        if self.arguments.strip()[:1] not in ("", "{"):
            raise invalid_value("{place}.arguments must be the text of a JSON object, such as '{}'")
        return self

    def plain(self) -> dict[str, Json]:
        """Return the call as a chat's assistant message lists it."""
        return {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


class FunctionCallOutput(Strict):
    """The result of a function call."""

    ignored = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: str
    output: _Texts

    def plain(self) -> dict[str, Json]:
        """Return the chat message with the result."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class Reasoning(Strict):
    """The reasoning of another model, which no chat template can render. It is ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _known_item(value: Json) -> Json:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None or kind in _KINDS:
        return value
    if kind == "item_reference":
        raise invalid_value(f"{{place}} is an item_reference, which is not supported by this server; {STATELESS}")
    raise invalid_value(f"{{place}} has the type {reprlib.repr(kind)}; expected one of the types {', '.join(_KINDS)}")


def _tag(value: Json | Strict) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind or 'message'}>"


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    Discriminator(_tag),
    BeforeValidator(_known_item),
]


def chat_messages(items: Sequence[Item]) -> list[dict[str, Json]]:
    """Return the chat messages.

    A call joins the assistant message before it, and text joins the calls before it: the model wrote them in one turn.
    """
    messages: list[dict[str, Json]] = []
    for item in items:
        if isinstance(item, FunctionCall):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1] = _with_call(messages[-1], item)
        elif isinstance(item, InputMessage) and item.role == "assistant" and messages and "tool_calls" in messages[-1]:
            texts = str(messages[-1]["content"]), _joined(item.content)
            messages[-1] = messages[-1] | {"content": "\n".join(filter(None, texts))}  # as in the answer of a chat
        elif not isinstance(item, Reasoning):
            messages.append(item.plain())
    return messages


def _with_call(message: dict[str, Json], call: FunctionCall) -> dict[str, Json]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return message | {"tool_calls": [*calls, call.plain()]}


def _joined(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)
