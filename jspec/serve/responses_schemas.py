"""Request body schemas of the Responses API, and conversion of its bodies to chats."""

import dataclasses
import json
import re
import reprlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator

from jspec.core.types import Json
from jspec.serve.chat_schemas import ChatBody, Function, ToolChoice
from jspec.serve.errors import Refusal
from jspec.serve.fields import MOST, MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, Strict, Whole, complaint, conflict
from jspec.serve.schemas import DecodingBody
from jspec.serve.validation import understood

LOGPROBS = "message.output_text.logprobs"
_MODES = ("none", "auto", "required")
_STATELESS = "it keeps no responses: send the whole conversation as input"
# What chats call a field, in the order of replacement -> what this API calls it.
_RENAMED = (
    (r"\bmessages\[\d+\][\w.\[\]]*", "input"),
    (r"\b[Tt]he messages are\b", "The input is"),
    (r"\bmessages\b", "input"),
    (r"\bresponse_format\b", "text.format"),
    (r"\bmax_(completion_)?tokens\b", "max_output_tokens"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
)


def _texts(value: Json) -> Json:
    """Convert a string to a list of parts, and the reason why an assistant refused to answer to its text."""
    if isinstance(value, str):
        return [{"type": "input_text", "text": value}]
    if isinstance(value, list):
        return [_as_text(part) if isinstance(part, dict) else part for part in value]
    return value


def _as_text(part: dict[str, Json]) -> dict[str, Json]:
    if part.get("type") == "refusal" and part.keys() == {"type", "refusal"}:
        return {"type": "output_text", "text": part["refusal"]}
    return part


class TextPart(Strict):
    """A part of a message, or of a function's output."""

    ignored = frozenset({"annotations", "logprobs"})

    type: Literal["input_text", "output_text", "text"]
    text: str


_Texts = Annotated[list[TextPart], FailFast(), BeforeValidator(_texts), Field(max_length=MOST_PARTS)]


class InputMessage(Strict):
    """A message of the conversation."""

    ignored = frozenset({"id", "status", "phase", "name"})

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Texts

    def plain(self) -> dict[str, Json]:
        """Return the message in the form of a chat."""
        return {"role": self.role, "content": _joined(self.content)}


class FunctionCall(Strict):
    """A call that the model has made."""

    ignored = frozenset({"id", "status"})

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    @model_validator(mode="after")
    def _has_arguments(self) -> Self:
        try:
            arguments: object = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise complaint("{place}.arguments must be the text of a JSON object, such as '{}'")
        return self

    def plain(self) -> dict[str, Json]:
        """Return the call in the form of a chat."""
        return {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}


class FunctionCallOutput(Strict):
    """The result of a call."""

    ignored = frozenset({"id", "status"})

    type: Literal["function_call_output"]
    call_id: str
    output: _Texts

    def plain(self) -> dict[str, Json]:
        """Return the result as a message of a chat."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _joined(self.output)}


class Reasoning(Strict):
    """The reasoning of another model, which no chat template can render. It is ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _input(value: Json) -> Json:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _known_item(value: Json) -> Json:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None or kind in _KINDS:
        return value
    if kind == "item_reference":
        raise complaint(f"{{place}} is an item_reference, which is not supported by this server; {_STATELESS}")
    raise complaint(f"{{place}} has the type {reprlib.repr(kind)}; expected one of the types {', '.join(_KINDS)}")


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


class FlatTool(Function):
    """A function that the model may call. Its arguments satisfy its schema, unless `strict` is false."""

    type: Literal["function"]
    strict: bool = True


def _function(value: Json) -> Json:
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind in (None, "function"):
        return value
    raise complaint(
        f"{{place}} has the type {reprlib.repr(kind)}, but this server calls no tools itself; send only functions"
    )


def _choice(value: Json) -> Json:
    if value in _MODES:
        return {"mode": value}
    fields = value if isinstance(value, dict) else {}
    if fields.get("type") == "function" and isinstance(fields.get("name"), str):
        return {"mode": "named", "name": fields["name"]}
    raise complaint(
        "{place} must be 'none', 'auto', 'required' or an object such as "
        '{"type": "function", "name": "f"}; got {given}'
    )


class TextFormat(Strict):
    """The output format: any text, any JSON object, or JSON that fits a schema, whether or not `strict` is set."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("", max_length=64)
    description: str = ""
    strict: bool = True
    held: dict[str, object] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.held is not None) != (self.type == "json_schema"):
            raise complaint("{place} must have schema if, and only if, its type is 'json_schema'")
        return self

    def plain(self) -> dict[str, Json]:
        """Return the format in the form that clients send."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type} | self.model_dump(by_alias=True, exclude={"type"})

    def of_chat(self) -> dict[str, Json]:
        """Return the format in the form of a chat."""
        fields = self.plain()
        kind = fields.pop("type")
        return {"type": kind} | ({"json_schema": fields} if fields else {})


class TextOptions(Strict):
    """The options of the output's text."""

    ignored = frozenset({"verbosity"})

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({"type": "text"}))


class NoStreamOptions(Strict):
    """The options of a stream, which have no effect: the last event always has the usage."""

    ignored = frozenset({"include_obfuscation", "include_usage"})


_Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # this and the others concern output that this server never has
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class ResponsesBody(DecodingBody):
    """The body of /v1/responses."""

    ignored = frozenset(
        {
            *("user", "store", "service_tier", "safety_identifier", "reasoning", "max_tool_calls"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        }
    )
    meaningless = MappingProxyType(
        {**DecodingBody.meaningless, "background": (False,), "truncation": ("disabled",), "context_management": ([],)}
    )
    refused = MappingProxyType(
        dict.fromkeys(("previous_response_id", "conversation"), _STATELESS)
        | {
            "prompt": "it keeps no prompts: send the text as instructions or input",
            "background": "it keeps no responses: omit this field, and read the response or its stream",
            "truncation": "set it to 'disabled', and shorten the input if it is too long",
            "context_management": "omit this field, and shorten the input if it is too long",
        }
    )

    input: Annotated[list[Item], FailFast(), BeforeValidator(_input), Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1, le=MOST)
    tools: Annotated[list[Annotated[FlatTool, BeforeValidator(_function)]], FailFast()] = Field(
        default_factory=list[FlatTool], max_length=MOST_TOOLS
    )
    tool_choice: Annotated[ToolChoice, BeforeValidator(_choice)] = ToolChoice()
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    top_logprobs: Whole = Field(0, ge=0, le=20)
    include: list[_Included] = Field(default_factory=list[_Included], max_length=64)
    metadata: dict[str, str] = Field(default_factory=dict[str, str], max_length=16)
    stream_options: NoStreamOptions | None = None
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict[str, object])

    @model_validator(mode="after")
    def _has_messages(self) -> Self:
        if all(isinstance(item, Reasoning) for item in self.input):
            raise conflict("input", "input has only reasoning, which is ignored; add a message")
        known = set[str]()
        for i, item in enumerate(self.input):
            if isinstance(item, FunctionCall):
                known.add(item.call_id)
            elif isinstance(item, FunctionCallOutput) and item.call_id not in known:
                raise conflict(
                    "input",
                    f"input[{i}] is the output of the call {reprlib.repr(item.call_id)}, but no earlier item makes "
                    "this call; add the item with this call",
                )
        return self

    @model_validator(mode="after")
    def _has_fitting_logprobs(self) -> Self:
        if self.top_logprobs and not self.lists_logprobs:
            raise conflict("top_logprobs", f"top_logprobs requires {LOGPROBS!r} in include; add this value")
        if self.lists_logprobs and self.tools and self.tool_choice.mode != "none":
            raise conflict(
                "include",
                f"include has {LOGPROBS!r}, which is not supported for outputs that may call functions; omit tools, "
                "or set tool_choice to 'none'",
            )
        return self

    @property
    def lists_logprobs(self) -> bool:
        """Whether the response lists the log-probabilities of the text."""
        return LOGPROBS in self.include


def as_chat(body: ResponsesBody) -> ChatBody:
    """Return the chat that a body asks to continue.

    Raises:
        Refusal: the chat is invalid. The error names the fields of the Responses API.
    """
    fields = body.model_dump(include={*DecodingBody.model_fields, "parallel_tool_calls", "chat_template_kwargs"})
    fields |= {
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools],
        "tool_choice": _choice_of_chat(body.tool_choice),
        "response_format": body.text.format.of_chat(),
        "logprobs": body.lists_logprobs,
        "top_logprobs": body.top_logprobs,
    }
    try:
        return understood(ChatBody, fields)
    except Refusal as refusal:
        raise renamed(refusal) from None


def renamed(refusal: Refusal) -> Refusal:
    """Return the refusal of a chat with the names that fields have in the Responses API."""
    message, param = refusal.message, refusal.param
    for pattern, name in _RENAMED:
        message = re.sub(pattern, name, message)
        param = param and re.sub(pattern, name, param)
    return dataclasses.replace(refusal, message=message, param=param)


def _messages(body: ResponsesBody) -> list[dict[str, Json]]:
    """Return the messages of a chat. A call belongs to the assistant message before it, as the model wrote both."""
    messages: list[dict[str, Json]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    for item in body.input:
        if isinstance(item, FunctionCall):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1] = _with_call(messages[-1], item)
        elif not isinstance(item, Reasoning):
            messages.append(item.plain())
    return messages


def _with_call(message: dict[str, Json], call: FunctionCall) -> dict[str, Json]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return message | {"tool_calls": [*calls, call.plain()]}


def _choice_of_chat(choice: ToolChoice) -> Json:
    return {"type": "function", "function": {"name": choice.name}} if choice.mode == "named" else choice.mode


def _joined(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)
