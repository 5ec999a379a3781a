"""Request body schemas of the Responses API, and their conversion to chat requests."""

import dataclasses
import re
import reprlib
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator

from jspec.core.types import Json
from jspec.serve.chat_schemas import ChatBody, Function, ToolChoice
from jspec.serve.errors import Refusal
from jspec.serve.fields import MOST, MOST_MESSAGES, MOST_TOOLS, Strict, WholeNumber, invalid_fields, invalid_value
from jspec.serve.input_items import STATELESS, FunctionCall, FunctionCallOutput, Item, Reasoning, chat_messages
from jspec.serve.schemas import DecodingBody
from jspec.serve.validation import validated

LOGPROBS = "message.output_text.logprobs"
_MODES = ("none", "auto", "required")
# Field names of the chat API -> field names of this API, in the order of replacement.
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
    """A function that the model may call. The arguments satisfy the schema, unless `strict` is false."""

    ignored = frozenset({"cache_control"})
    no_effect = MappingProxyType({"defer_loading": (False,), "allowed_callers": (["direct"],), "async": (False,)})

    type: Literal["function"]
    strict: bool = True


def _function(value: Json) -> Json:
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind in (None, "function"):
        return value
    raise invalid_value(
        f"{{place}} has the type {reprlib.repr(kind)}, but this server cannot run tools itself; send only functions"
    )


def _choice(value: Json) -> Json:
    if value in _MODES:
        return {"mode": value}
    fields = value if isinstance(value, dict) else {}
    if fields.get("type") == "function" and isinstance(fields.get("name"), str):
        return {"mode": "named", "name": fields["name"]}
    raise invalid_value(
        "{place} must be 'none', 'auto', 'required' or an object such as "
        '{"type": "function", "name": "f"}; got {given}'
    )


class TextFormat(Strict):
    """The output format: any text, any JSON object, or JSON that satisfies a schema, whether or not `strict` is set."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = Field("", max_length=64)
    description: str = ""
    strict: bool = True
    definition: dict[str, object] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.definition is not None) != (self.type == "json_schema"):
            raise invalid_value("{place} must have schema if, and only if, its type is 'json_schema'")
        return self

    def plain(self) -> dict[str, Json]:
        """Return the format as clients send it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type} | self.model_dump(by_alias=True, exclude={"type"})

    def as_chat_format(self) -> dict[str, Json]:
        """Return the format as the `response_format` of a chat."""
        fields = self.plain()
        kind = fields.pop("type")
        return {"type": kind} | ({"json_schema": fields} if fields else {})


class TextOptions(Strict):
    """The options of text output."""

    ignored = frozenset({"verbosity"})

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({"type": "text"}))


class ResponsesStreamOptions(Strict):
    """The options of a stream. None has an effect: the last event always has the usage."""

    ignored = frozenset({"include_obfuscation", "include_usage"})


_Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",  # this and the following values concern output that this server never generates
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
    no_effect = MappingProxyType(
        {**DecodingBody.no_effect, "background": (False,), "truncation": ("disabled",), "context_management": ([],)}
    )
    unsupported = MappingProxyType(
        dict.fromkeys(("previous_response_id", "conversation"), STATELESS)
        | {
            "prompt": "prompts are not stored, so send the text as instructions or input",
            "background": "responses are not stored, so omit this field, and read the response or its stream",
            "truncation": "set it to 'disabled', and shorten the input if it is too long",
            "context_management": "omit this field, and shorten the input if it is too long",
        }
    )

    input: Annotated[list[Item], FailFast(), BeforeValidator(_input), Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: WholeNumber | None = Field(None, ge=1, le=MOST)
    tools: Annotated[list[Annotated[FlatTool, BeforeValidator(_function)]], FailFast()] = Field(
        default_factory=list[FlatTool], max_length=MOST_TOOLS
    )
    tool_choice: Annotated[ToolChoice, BeforeValidator(_choice)] = ToolChoice()
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    top_logprobs: WholeNumber = Field(0, ge=0, le=20)
    include: list[_Included] = Field(default_factory=list[_Included], max_length=64)
    metadata: dict[str, str] = Field(default_factory=dict[str, str], max_length=16)
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict[str, object])

    @model_validator(mode="after")
    def _has_messages(self) -> Self:
        if all(isinstance(item, Reasoning) for item in self.input):
            raise invalid_fields("input", "input contains only reasoning, which is ignored; add a message")
        call_ids = set[str]()
        for i, item in enumerate(self.input):
            if isinstance(item, FunctionCall):
                call_ids.add(item.call_id)
            elif isinstance(item, FunctionCallOutput) and item.call_id not in call_ids:
                raise invalid_fields(
                    "input",
                    f"input[{i}] is the output of the call {reprlib.repr(item.call_id)}, but no earlier item is "
                    "this call; add the function_call item",
                )
        return self

    @model_validator(mode="after")
    def _has_fitting_logprobs(self) -> Self:
        if self.top_logprobs and not self.lists_logprobs:
            raise invalid_fields("top_logprobs", f"top_logprobs requires {LOGPROBS!r} in include; add this value")
        if self.lists_logprobs and self.tools and self.tool_choice.mode != "none":
            raise invalid_fields(
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
    """Return the equivalent chat request.

    Raises:
        Refusal: the chat is invalid. The error names the fields of the Responses API.
    """
    common = {*DecodingBody.model_fields, "parallel_tool_calls", "chat_template_kwargs"}
    fields = body.model_dump(include=common, exclude_unset=True)  # a chat may treat a field as missing
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields |= {
        "messages": [*instructions, *chat_messages(body.input)],
        "max_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in body.tools],
        "tool_choice": _chat_tool_choice(body.tool_choice),
        "response_format": body.text.format.as_chat_format(),
        "logprobs": body.lists_logprobs,
        "top_logprobs": body.top_logprobs,
    }
    try:
        return validated(ChatBody, fields)
    except Refusal as refusal:
        raise renamed(refusal) from None


def renamed(refusal: Refusal) -> Refusal:
    """Return a chat's refusal, with the field names of the Responses API."""
    message, param = refusal.message, refusal.param
    for pattern, name in _RENAMED:
        message = re.sub(pattern, name, message)
        param = param and re.sub(pattern, name, param)
    return dataclasses.replace(refusal, message=message, param=param)


def _chat_tool_choice(choice: ToolChoice) -> Json:
    return {"type": "function", "function": {"name": choice.name}} if choice.mode == "named" else choice.mode
