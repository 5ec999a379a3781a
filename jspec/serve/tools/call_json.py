"""Parsing of a call that a model writes as a JSON object, which may still be incomplete.

The whole text is parsed again after every new token. Regular expressions therefore scan the characters.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterator

ARGUMENTS = ("arguments", "parameters")
_KEYS = ("type", "id", "name", *ARGUMENTS)  # the keys of calls without a marker
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_START = r'"[^"\\]*+(?:\\.[^"\\]*+)*+'
_STRING = re.compile(_STRING_START + '"', re.DOTALL)
_OPEN_STRING = re.compile(_STRING_START + r"\\?\Z", re.DOTALL)
_WORD = re.compile(r"[-+.\w]+")  # a number, true, false or null
# Matches strings and brackets, because brackets in strings do not count. An incomplete string extends to the end.
_NESTING = {
    opening: re.compile(rf'{_STRING_START}(?:"|\\?\Z)|{brackets}', re.DOTALL)
    for opening, brackets in (("{", "[{}]"), ("[", r"[\[\]]"))
}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A function call.

    Attributes:
        name: the function's name.
        arguments: the text of a JSON object, which is incomplete while the model writes it.
    """

    name: str
    arguments: str

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are complete."""
        return self.arguments.startswith("{") and end_of_value(self.arguments, 0) == len(self.arguments)


@dataclasses.dataclass(frozen=True)
class ParseResult:
    """The result of parsing a call at a position.

    Attributes:
        call: the call; None if the text contains no call, or not yet enough of a call.
        end: the end of the call. If the text is not a call, the position where this becomes clear.
        is_undecided: whether the text may become a call.
    """

    call: ToolCall | None
    end: int
    is_undecided: bool = False


class _Unfinished(Exception):
    """An error raised if the text ends before the JSON value does."""


class _Malformed(Exception):
    """An error raised if the text is not the expected JSON."""

    def __init__(self, at: int):
        super().__init__(at)
        self.at = at


def end_of_value(text: str, start: int) -> int | None:
    """Return the end of the object or array that starts at `start`, or None if it is incomplete."""
    depth = 0
    for match in _NESTING[text[start]].finditer(text, start):
        token = match.group()
        if token in ("{", "["):
            depth += 1
        elif token in ("}", "]"):
            depth -= 1
            if depth == 0:
                return match.end()
    return None


def parse_call(text: str, start: int, names: Collection[str], is_marked: bool = True) -> ParseResult:
    """Parse ``{"name": ..., "arguments": {...}}``, with optional whitespace before it.

    The members may be in any order, and "parameters" may replace "arguments". A call begins when its name is complete
    and its arguments have begun. Null arguments mean ``{}``. Arguments may also be a string that contains an
    object. The call then begins when the string is complete.

    Args:
        text: the text so far.
        start: where to start.
        names: the names of the functions that may be called.
        is_marked: whether a marker shows that the object is a call. Other members are then ignored, and arguments may
            be missing. Without a marker, the object may be a JSON answer.
    """
    members = _Members(text, start, None if is_marked else _KEYS)
    name: str | None = None
    arguments: str | None = None
    try:
        for key, value, end in members:
            if key == "name" and name is None:
                name = _name(text[value:end], names, end)
            elif key in ARGUMENTS and arguments is None:
                arguments = _arguments(text[value:end], end)
            if name is not None and arguments is not None:
                members.keys = None
        end = members.at
        arguments = arguments or ("{}" if is_marked else None)
    except _Unfinished:
        end = len(text)
        if name is None or arguments is None:
            return ParseResult(None, end, is_undecided=True)
    except _Malformed as error:
        end = members.at
        if name is None or arguments is None:
            return ParseResult(None, error.at)
    return ParseResult(None if name is None or arguments is None else ToolCall(name, arguments), end)


class _Members:
    """The members of a JSON object: each key, and the position of its value.

    Attributes:
        at: the end of the last complete member, or of the object.
        keys: the keys that may follow; None for any key.
    """

    def __init__(self, text: str, start: int, keys: Collection[str] | None):
        self._text, self.at, self.keys = text, start, keys

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield each key, and the start and the end of its value. An incomplete object or array is also yielded.

        Raises:
            _Unfinished: the text ends before the object does.
            _Malformed: the text is not a JSON object, or has a key that is not in `keys`.
        """
        at = self._expect("{", self.at)
        while self._peek(at) != "}":
            start = self._skip(at)
            end = self._end_of_string(start)
            key = text_of(self._text[start:end]) or ""
            if self.keys is not None and key not in self.keys:
                raise _Malformed(end)
            value = self._skip(self._expect(":", end))
            at = self._end(value)
            yield key, value, len(self._text) if at is None else at
            if at is None:
                raise _Unfinished
            self.at = at
            if self._peek(at) != "}":
                at = self._expect(",", at)
        self.at = self._skip(at) + 1

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        at = at if match is None else match.end()
        if at == len(self._text):
            raise _Unfinished
        return at

    def _peek(self, at: int) -> str:
        return self._text[self._skip(at)]

    def _expect(self, character: str, at: int) -> int:
        at = self._skip(at)
        if self._text[at] != character:
            raise _Malformed(at)
        return at + 1

    def _end(self, start: int) -> int | None:
        """Return the end of the value at `start`, or None for an incomplete object or array."""
        first = self._text[start]
        if first in _NESTING:
            return end_of_value(self._text, start)
        if first == '"':
            return self._end_of_string(start)
        match = _WORD.match(self._text, start)
        if match is None:
            raise _Malformed(start)
        if match.end() == len(self._text):
            raise _Unfinished
        return match.end()

    def _end_of_string(self, start: int) -> int:
        if match := _STRING.match(self._text, start):
            return match.end()
        if _OPEN_STRING.match(self._text, start):
            raise _Unfinished
        raise _Malformed(start)


def text_of(literal: str) -> str | None:
    """Return the text of a JSON string, or None if the literal is not a string that UTF-8 can represent."""
    try:
        text: object = json.loads(literal, strict=False)
        if not isinstance(text, str):
            return None
        text.encode()
    except ValueError:
        return None
    return text


def _name(value: str, names: Collection[str], end: int) -> str:
    name = text_of(value) if value.startswith('"') else None
    if name is None or name not in names:
        raise _Malformed(end)
    return name


def _arguments(value: str, end: int) -> str:
    if value == "null":
        return "{}"
    text = (text_of(value) or "").strip() if value.startswith('"') else value
    if not text.startswith("{") or (text is not value and end_of_value(text, 0) != len(text)):
        raise _Malformed(end)
    return text
