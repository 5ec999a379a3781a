"""The formats of Mistral's models: a marker, followed by a JSON array of calls or by a name and its arguments."""

import re
import secrets
import string
from collections.abc import Collection

from jspec.serve.tools.call_json import ParseResult, ToolCall, end_of_value, parse_call
from jspec.serve.tools.tool_format import CallSpan, Notation, ToolFormat, next_marked

START, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_LENGTH = 9
# The quantifiers are possessive, because long runs of spaces or letters would otherwise take quadratic time.
_ARRAY = re.compile(r"\s*+\[?\s*+(?=\{)")
_HEADER = re.compile(r"\s*+([\w.:/-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_PART_OF_HEADER = re.compile(r"\s*+(?:\[\s*+|[\w.:/-]++\s*+(?:\[[A-Z_]*+\]?\s*+\w*+\s*+){0,2})?\Z")
_NEXT = re.compile(r"\s*+,\s*+(?=\{)")
_END = re.compile(r"\s*+(?:\]|,?\s*+\Z)")


class Mistral(ToolFormat):
    """Calls as ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``.

    Both of Mistral's notations are parsed, whichever the model was trained on.

    Args:
        has_space: whether the model writes a space after the marker.
    """

    name = "mistral"
    special_tokens = (START, ARGS, CALL_ID)

    def __init__(self, has_space: bool = True):
        opening = f"{START} [" if has_space else f"{START}["
        self.notation = Notation('{"name": "', '", "arguments": ', "}", opening, ", ", "]")

    def next_call(self, text: str, at: int, names: Collection[str]) -> CallSpan | None:
        """Return the first call at or after a position, or the first text that may become one."""

        def read(text: str, at: int) -> ParseResult:
            result = _read(text, at, names)
            end = None if result.call is None else _END.match(text, result.end)
            return ParseResult(result.call, end.end()) if end else result

        if at and (match := _NEXT.match(text, at)):
            result = read(text, match.end())
            if result.call is not None or result.is_undecided:
                return CallSpan(at, result.end, result.call)
            return next_marked(text, result.end, START, read)
        return next_marked(text, at, START, read)

    def new_id(self) -> str:
        """Return a new call id of nine letters and digits, as Mistral's templates require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


class MistralArgs(Mistral):
    """Calls as ``[TOOL_CALLS]name[ARGS]{...}``, as in models since Mistral Small 3.2."""

    name = "mistral-args"

    def __init__(self):
        self.notation = Notation(START, ARGS, "")


def is_mistral_id(text: str) -> bool:
    """Return whether Mistral's templates accept the id of a call."""
    return re.fullmatch(r"[a-zA-Z0-9]{9}", text) is not None


def _read(text: str, at: int, names: Collection[str]) -> ParseResult:
    if match := _ARRAY.match(text, at):
        return parse_call(text, match.end(), names)
    match = _HEADER.match(text, at)
    if match is None:
        is_undecided = _PART_OF_HEADER.match(text, at) is not None
        return ParseResult(None, len(text) if is_undecided else at, is_undecided)
    if match[1] not in names:
        return ParseResult(None, match.end())
    end = end_of_value(text, match.end())
    end = len(text) if end is None else end
    return ParseResult(ToolCall(match[1], text[match.end() : end]), end)
