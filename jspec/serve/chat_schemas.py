"""Request body schemas of chats: messages, tools and the other fields of /v1/chat/completions."""

import re
from types import MappingProxyType
from typing import Annotated, Literal, Self, cast

from pydantic import BeforeValidator, FailFast, Field, model_validator

from jspec.core.types import Json
from jspec.serve.fields import (
    MOST,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    ModelBody,
    Strict,
    Whole,
    complaint,
    conflict,
)
from jspec.serve.schemas import Body
from jspec.serve.tools.tool_format import FunctionTool

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MODES = ("none", "auto", "required")


def _parts(value: Json) -> Json:
    """Convert a string to a list of parts, and the reason why an assistant refused to answer to its text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return [_as_text(part) if isinstance(part, dict) else part for part in value]
    return value


def _as_text(part: dict[str, Json]) -> dict[str, Json]:
    if part.get("type") == "refusal" and part.keys() == {"type", "refusal"}:
        return {"type": "text", "text": part["refusal"]}
    return part


class Part(Strict):
    """A part of a message."""

    ignored = frozenset({"cache_control", "annotations", "logprobs"})

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """The function that an assistant called, and its arguments as the text of a JSON object."""

    name: str
    arguments: str = "{}"


class Call(Strict):
    """A call in an assistant message."""

    ignored = frozenset({"index", "cache_control"})

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message of a conversation."""

    ignored = frozenset(
        {
            *("name", "type", "id", "status", "cache_control", "annotations", "reasoning", "reasoning_content"),
            *("reasoning_details", "provider_specific_fields"),
        }
    )
    meaningless = MappingProxyType({"tool_calls": ([],), "refusal": ("",)})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], FailFast(), BeforeValidator(_parts), Field(max_length=MOST_PARTS)] = Field(
        default_factory=list[Part]
    )
    refusal: str | None = None
    tool_calls: Annotated[list[Call], FailFast()] = Field(default_factory=list[Call], max_length=MOST_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise complaint("{place}.content is missing; add this field")
        for name in ("tool_calls", "refusal"):
            if getattr(self, name) and self.role != "assistant":
                raise complaint(f"{{place}} has {name}, but only assistant messages may have them; omit this field")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise complaint("{place} must have tool_call_id if, and only if, its role is 'tool'")
        return self

    @property
    def text(self) -> str:
        """The text of all parts. An assistant that refused to answer has said why."""
        return "".join(part.text for part in self.content) or self.refusal or ""

    def plain(self) -> dict[str, Json]:
        """Return the message in the form that chat templates expect."""
        calls = [call.model_dump() for call in self.tool_calls]
        others: dict[str, Json] = {"tool_calls": calls} if calls else {}
        others |= {} if self.tool_call_id is None else {"tool_call_id": self.tool_call_id}
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text, **others}


class Function(Strict):
    """The definition of a function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, object] | None = None
    strict: bool = False

    @model_validator(mode="after")
    def _can_be_called(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise complaint(
                "{place}.name must consist of 1 to 128 characters, namely letters, digits and the characters _ . : / -"
            )
        if (self.parameters or {}).get("type", "object") != "object":
            raise complaint("{place}.parameters must be a JSON schema with the type 'object'")
        return self


class Tool(Strict):
    """A tool that the model may call."""

    ignored = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function

    def plain(self) -> FunctionTool:
        """Return the tool without its place in the request."""
        function = self.function
        parameters = cast("dict[str, Json] | None", function.parameters)
        return FunctionTool(function.name, function.description, parameters, function.strict)


class ToolChoice(Strict):
    """Which tools the model calls.

    Attributes:
        mode: "none" for no call, "auto" for as many as the model wants, "required" for at least one, and "named" for
            one call of the function `name`.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""


def _choice(value: Json) -> Json:
    if value in _MODES:
        return {"mode": value}
    fields = value if isinstance(value, dict) else {}
    function = fields.get("function")
    if fields.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str):
        return {"mode": "named", "name": function["name"]}
    raise complaint(
        "{place} must be 'none', 'auto', 'required' or an object such as "
        '{"type": "function", "function": {"name": "f"}}; got {given}'
    )


class Conversation(ModelBody):
    """Messages and tools, and how the chat template renders them."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=MOST_MESSAGES)
    tools: Annotated[list[Tool], FailFast()] = Field(default_factory=list[Tool], max_length=MOST_TOOLS)
    tool_choice: Annotated[ToolChoice, BeforeValidator(_choice)] = ToolChoice()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, object] = Field(default_factory=dict[str, object])

    @model_validator(mode="after")
    def _continues_message(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set:
            raise conflict(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; set only one of them to true",
            )
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls or not last.text.strip():
            raise conflict(
                "continue_final_message",
                "continue_final_message requires that the last message is an assistant message with text",
            )
        return self

    @model_validator(mode="after")
    def _has_fitting_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise conflict("tools", f"tools has two functions named {twice!r}; give each function its own name")
        mode = self.tool_choice.mode
        if mode == "named" and self.tool_choice.name not in names:
            raise conflict(
                "tool_choice", f"tool_choice names {self.tool_choice.name!r}, which is not a function in tools"
            )
        if mode == "required" and not names:
            raise conflict("tool_choice", "tool_choice is 'required', but there are no tools; add tools")
        return self

    @model_validator(mode="after")
    def _has_calls_for_results(self) -> Self:
        known = set[str]()
        for i, message in enumerate(self.messages):
            known |= {call.id for call in message.tool_calls}
            if message.tool_call_id is not None and message.tool_call_id not in known:
                raise conflict(
                    "messages",
                    f"messages[{i}] is the result of the call {message.tool_call_id!r}, but no earlier message makes "
                    "this call; add the assistant message with this call",
                )
        return self

    @property
    def may_call(self) -> bool:
        """Whether the output may call functions."""
        return bool(self.tools) and self.tool_choice.mode != "none"


class ChatBody(Conversation, Body):
    """The body of /v1/chat/completions."""

    meaningless = MappingProxyType({**Body.meaningless, "modalities": (["text"],), "functions": ([],)})
    refused = MappingProxyType(
        dict.fromkeys(("modalities", "audio", "web_search_options", "function_call", "images"), "omit this field")
        | {"functions": "send tools instead"}
    )

    max_tokens: Whole | None = Field(None, ge=1, le=MOST)
    max_completion_tokens: Whole | None = Field(None, ge=1, le=MOST)
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: Whole = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise conflict("top_logprobs", "top_logprobs requires logprobs; set logprobs to true")
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise conflict(
                    "max_tokens", "max_tokens and max_completion_tokens differ; send only one of these fields"
                )
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise conflict("min_tokens", "min_tokens is greater than max_completion_tokens; reduce min_tokens")
        if self.calls_are_constrained and (self.ignore_eos or self.min_tokens):
            raise conflict("tools", "the calls determine where the output ends; omit ignore_eos and min_tokens")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the output must be a call."""
        return self.tool_choice.mode in ("required", "named")

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the output may call."""
        is_named = self.tool_choice.mode == "named"
        return [tool for tool in self.tools if not is_named or tool.function.name == self.tool_choice.name]

    @property
    def calls_are_constrained(self) -> bool:
        """Whether the output is constrained to valid calls."""
        is_free = self.parallel_tool_calls and not any(tool.function.strict for tool in self.tools)
        return self.may_call and (self.must_call or not is_free)

    @property
    def constrained_by(self) -> str:
        """The field that constrains the output, or an empty string."""
        is_both = self.may_call and self.is_formatted
        return "tools" if self.calls_are_constrained or is_both else super().constrained_by
