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
    WholeNumber,
    invalid_fields,
    invalid_value,
    text_parts,
)
from jspec.serve.schemas import Body
from jspec.serve.tools.tool_format import FunctionTool

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_MODES = ("none", "auto", "required")


class Part(Strict):
    """A part of a message."""

    ignored = frozenset({"cache_control", "prompt_cache_breakpoint", "annotations", "logprobs"})

    type: Literal["text"]
    text: str


_Parts = Annotated[list[Part], FailFast(), BeforeValidator(text_parts("text")), Field(max_length=MOST_PARTS)]


class CalledFunction(Strict):
    """The function that an assistant called, and the arguments as the text of a JSON object."""

    ignored = frozenset({"parsed_arguments"})  # added by OpenAI's client

    name: str
    arguments: str = "{}"


class Call(Strict):
    """A function call in an assistant message."""

    ignored = frozenset({"index", "cache_control"})

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message of a conversation."""

    ignored = frozenset(
        {
            *("type", "id", "status", "cache_control", "annotations", "parsed"),
            *("reasoning_details", "provider_specific_fields"),
        }
    )
    no_effect = MappingProxyType({"tool_calls": ([],), "refusal": ("",)})

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Parts = Field(default_factory=list[Part])
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[Call], FailFast()] = Field(default_factory=list[Call], max_length=MOST_TOOLS)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise invalid_value("{place}.content is missing; add this field")
        for name in ("tool_calls", "refusal"):
            if getattr(self, name) and self.role != "assistant":
                raise invalid_value(f"{{place}} has {name}, but only assistant messages may have them; omit this field")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise invalid_value("{place} must have tool_call_id if, and only if, its role is 'tool'")
        return self

    @property
    def text(self) -> str:
        """The text of all parts, or the refusal if there is no text."""
        return "".join(part.text for part in self.content) or self.refusal or ""

    def plain(self) -> dict[str, Json]:
        """Return the message as chat templates expect it."""
        calls = [call.model_dump() for call in self.tool_calls]
        others: dict[str, Json] = {"tool_calls": calls} if calls else {}
        given = {
            "tool_call_id": self.tool_call_id,
            "name": self.name,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        others |= {name: value for name, value in given.items() if value is not None}
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
            raise invalid_value(
                "{place}.name must have 1 to 128 characters, each a letter, a digit or one of _ . : / -"
            )
        if (self.parameters or {}).get("type", "object") != "object":
            raise invalid_value("{place}.parameters must be a JSON schema with the type 'object'")
        return self


class Tool(Strict):
    """A tool that the model may call."""

    ignored = frozenset({"cache_control"})

    type: Literal["function"]
    function: Function

    def plain(self) -> FunctionTool:
        """Return the tool as a `FunctionTool`."""
        function = self.function
        parameters = cast("dict[str, Json] | None", function.parameters)
        return FunctionTool(function.name, function.description, parameters, function.strict)


class ToolChoice(Strict):
    """The choice between calls and text.

    Attributes:
        mode: "none" for no call, "auto" for text, calls or both, "required" for at least one call, and "named" for one
            call of the function `name`.
    """

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""


def _choice(value: Json) -> Json:
    if value in _MODES:
        return {"mode": value}
    if isinstance(value, dict) and value.keys() == {"type", "function"} and value["type"] == "function":
        function = value["function"]
        if isinstance(function, dict) and function.keys() == {"name"} and isinstance(function["name"], str):
            return {"mode": "named", "name": function["name"]}
    raise invalid_value(
        "{place} must be 'none', 'auto', 'required' or an object such as "
        '{"type": "function", "function": {"name": "f"}}; got {given}'
    )


class Conversation(ModelBody):
    """Messages, tools, and options for rendering them with the chat template."""

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
            raise invalid_fields(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other; set only one of them to true",
            )
        last = self.messages[-1] if self.messages else None
        if last is None or last.role != "assistant" or last.tool_calls or not last.text.strip():
            raise invalid_fields(
                "continue_final_message",
                "continue_final_message requires that the last message is an assistant message with text",
            )
        return self

    @model_validator(mode="after")
    def _has_fitting_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise invalid_fields("tools", f"tools has two functions named {twice!r}; give each function its own name")
        mode = self.tool_choice.mode
        if mode == "named" and self.tool_choice.name not in names:
            raise invalid_fields(
                "tool_choice",
                f"tool_choice names {self.tool_choice.name!r}, which is not a function in tools; name one of the tools",
            )
        if mode == "required" and not names:
            raise invalid_fields("tool_choice", "tool_choice is 'required', but there are no tools; add tools")
        return self

    @model_validator(mode="after")
    def _has_calls_for_results(self) -> Self:
        call_ids = set[str]()
        for i, message in enumerate(self.messages):
            call_ids |= {call.id for call in message.tool_calls}
            if message.tool_call_id is not None and message.tool_call_id not in call_ids:
                raise invalid_fields(
                    "messages",
                    f"messages[{i}] is the result of the call {message.tool_call_id!r}, but no earlier message has "
                    "this call; add the assistant message with the call",
                )
        return self

    @property
    def may_call(self) -> bool:
        """Whether the output may call functions."""
        return bool(self.tools) and self.tool_choice.mode != "none"


class ChatBody(Conversation, Body):
    """The body of /v1/chat/completions."""

    no_effect = MappingProxyType({**Body.no_effect, "modalities": (["text"],), "functions": ([],)})
    unsupported = MappingProxyType(
        dict.fromkeys(("modalities", "audio", "web_search_options", "function_call", "images"), "omit this field")
        | {"functions": "send tools instead"}
    )

    max_tokens: WholeNumber | None = Field(None, ge=1, le=MOST)
    max_completion_tokens: WholeNumber | None = Field(None, ge=1, le=MOST)
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: WholeNumber = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid_fields("top_logprobs", "top_logprobs requires logprobs; set logprobs to true")
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise invalid_fields(
                    "max_tokens", "max_tokens and max_completion_tokens differ; send only one of these fields"
                )
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid_fields("min_tokens", "min_tokens is greater than max_completion_tokens; reduce min_tokens")
        if self.calls_are_constrained and (self.ignore_eos or self.min_tokens or self.stop_token_ids):
            raise invalid_fields(
                "tools",
                "constrained calls determine the output's end; omit ignore_eos, min_tokens and stop_token_ids",
            )
        return self

    @property
    def must_call(self) -> bool:
        """Whether the output must consist of calls."""
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
