"""Request body schemas of the Responses API, and conversion of its bodies to chats."""

import dataclasses
import re
import reprlib
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from jspec.core.types import Json
from jspec.serve.chat_schemas import ChatBody, Function, ToolChoice
from jspec.serve.errors import Refusal
from jspec.serve.fields import MOST, MOST_MESSAGES, MOST_TOOLS, Strict, Whole, complaint, conflict
from jspec.serve.input_items import STATELESS, FunctionCall, FunctionCallOutput, Item, Reasoning, messages_of
from jspec.serve.schemas import DecodingBody
from jspec.serve.validation import understood

LOGPROBS = "message.output_text.logprobs"
_MODES = ("none", "auto", "required")
# What chats call a field, in the order of replacement -> what this API calls it.
_RENAMED = (
    (r"\bmessages\[\d+\]\.tool_calls (?=should)", "a series of calls in input "),
    (r"\bmessages\[\d+\][\w.\[\]]*", "input"),
    (r"\b[Tt]he messages are\b", "The input is"),
    (r"\bmessages\b", "input"),
    (r"\bresponse_format\b", "text.format"),
    (r"\bmax_(completion_)?tokens\b", "max_output_tokens"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
)


def _input(value: Json) -> Json:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


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
        dict.fromkeys(("previous_response_id", "conversation"), STATELESS)
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
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields |= {
        "messages": [*instructions, *messages_of(body.input)],
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


def _choice_of_chat(choice: ToolChoice) -> Json:
    return {"type": "function", "function": {"name": choice.name}} if choice.mode == "named" else choice.mode
