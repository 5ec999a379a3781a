"""The interface of a tool-call format: how one family of chat models writes function calls."""

import abc
import dataclasses
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

from jspec.core.types import Json
from jspec.serve.tools.call_json import ParseResult
from jspec.serve.tools.call_json import ToolCall as ToolCall

# Keywords that apply to unlisted properties, or that combine schemas.
_OPEN = {
    *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties", "minProperties"),
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "dependencies"),
}


@dataclasses.dataclass(frozen=True)
class FunctionTool:
    """A function that the model may call.

    Attributes:
        name: the function's name.
        description: what the function does; "" if the client did not send a description.
        parameters: the JSON schema of the arguments; None if the client did not send one.
        is_strict: whether the client asked for arguments that satisfy the schema.
    """

    name: str
    description: str
    parameters: Mapping[str, Json] | None
    is_strict: bool

    def as_json(self) -> dict[str, Json]:
        """Return the tool as chat templates expect it."""
        function: dict[str, Json] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}

    @property
    def schema(self) -> dict[str, Json]:
        """The JSON schema of the arguments.

        The schema forbids unlisted properties, with two exceptions: it has a keyword that applies to them or combines
        schemas, or it lists only required names. Without parameters, only ``{}`` is allowed.
        """
        schema: dict[str, Json] = {"type": "object", **(self.parameters or {})}
        is_open = _OPEN & schema.keys() or ("required" in schema and "properties" not in schema)
        return schema if is_open else {"properties": {}, **schema, "additionalProperties": False}


@dataclasses.dataclass(frozen=True)
class Reply:
    """A model's output, split into text and calls.

    Attributes:
        content: the text outside calls.
        calls: the calls. Only the last one may be incomplete.
        before: the length of the content before each call.
    """

    content: str
    calls: tuple[ToolCall, ...]
    before: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class CallSpan:
    """The span of a call in a text, or of text that may still become a call.

    Attributes:
        start, end: the characters of the call, including its markers.
        call: the call; None if the text may still become a call.
    """

    start: int
    end: int
    call: ToolCall | None


@dataclasses.dataclass(frozen=True)
class Notation:
    """The fixed text around the names and arguments of calls.

    Attributes:
        opening: the text before the first call.
        before_name, before_arguments, after_arguments: the text of a call, around its name and its arguments.
        between: the text between two calls.
        closing: the text after the last call.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    opening: str = ""
    between: str = ""
    closing: str = ""

    def write(self, calls: Sequence[ToolCall]) -> str:
        """Return the text of one or more calls."""
        written = (
            f"{self.before_name}{call.name}{self.before_arguments}{call.arguments}{self.after_arguments}"
            for call in calls
        )
        return f"{self.opening}{self.between.join(written)}{self.closing}"


class ToolFormat(abc.ABC):
    """A tool-call format.

    Attributes:
        name: the format's name.
        special_tokens: the tokens that delimit calls. A detokenizer hides those that are special tokens.
        notation: the text in which calls are written.
        optional_opening: text that models may write before the opening.
        plain_start: a regular expression for the first character of free text; None for any character.
    """

    name: ClassVar[str]
    special_tokens: ClassVar[tuple[str, ...]]
    notation: Notation
    optional_opening: ClassVar[str] = ""
    plain_start: ClassVar[str | None] = None

    def parse(self, text: str, names: Collection[str], is_complete: bool) -> Reply:
        """Split the text of an output into content and calls.

        As the text grows, the content, the number of calls and each call's arguments only grow. Text that may still
        become part of a call is therefore held back until `is_complete`. Text that looks like a call of an unknown
        function, or that is not JSON, is content. Whitespace next to calls is dropped. A line break separates pieces
        of content that had calls between them.

        Args:
            text: the text so far.
            names: the names of the functions that may be called.
            is_complete: whether the text has ended. An incomplete call then keeps its incomplete arguments.
        """
        content, calls, before, at, visible = "", list[ToolCall](), list[int](), 0, len(text)
        while (span := self.next_call(text, at, names)) is not None:
            if span.call is None:
                visible = len(text) if is_complete else span.start
                break
            piece = text[at : span.start].rstrip()
            content = _joined(content, piece.lstrip() if calls else piece)
            calls.append(span.call)
            before.append(len(content))
            at = span.end
        rest = text[at:visible] if is_complete else text[at:visible].rstrip()
        return Reply(_joined(content, rest.lstrip() if calls else rest), tuple(calls), tuple(before))

    @abc.abstractmethod
    def next_call(self, text: str, at: int, names: Collection[str]) -> CallSpan | None:
        """Return the first call at or after a position, or the first text that may become one.

        Args:
            text: the text so far.
            at: where to start: 0, or the end of the previous call.
            names: the names of the functions that may be called.
        """

    def new_id(self) -> str:
        """Return a new id for a call."""
        return f"call_{secrets.token_hex(12)}"


def next_marked(
    text: str,
    at: int,
    marker: str,
    read: Callable[[str, int], ParseResult],
) -> CallSpan | None:
    """Return the first call that follows a marker, or the first text that may become one.

    Args:
        text: the text so far.
        at: where to start.
        marker: the text before a call.
        read: a function that reads a call after the marker.
    """
    while (start := text.find(marker, at)) >= 0:
        result = read(text, start + len(marker))
        if result.call is not None or result.is_undecided:
            return CallSpan(start, result.end, result.call)
        at = result.end
    for length in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if text.endswith(marker[:length]):
            return CallSpan(len(text) - length, len(text), None)
    return None


def _joined(content: str, piece: str) -> str:
    """Join two pieces of content that had a call between them."""
    return "\n".join(filter(None, (content, piece)))
