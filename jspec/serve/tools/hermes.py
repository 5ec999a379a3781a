"""The Hermes format: ``<tool_call>`` elements that contain JSON, as in Hermes 2 Pro, Qwen 2.5 and Qwen 3."""

import re
from collections.abc import Collection

from jspec.serve.tools.call_json import ParseResult, parse_call
from jspec.serve.tools.tool_format import CallSpan, Notation, ToolFormat, next_marked

START, END = "<tool_call>", "</tool_call>"
_REST = re.compile(r"[\s}]*")  # small models write extra braces


class Hermes(ToolFormat):
    """Calls as ``<tool_call>`` elements, with optional text before and after."""

    name = "hermes"
    special_tokens = (START, END)
    notation = Notation(f'{START}\n{{"name": "', '", "arguments": ', f"}}\n{END}", between="\n")

    def next_call(self, text: str, at: int, names: Collection[str]) -> CallSpan | None:
        """Return the first call at or after a position, or the first text that may become one."""

        def read(text: str, at: int) -> ParseResult:
            result = parse_call(text, at, names)
            return result if result.call is None else ParseResult(result.call, _end(text, result.end))

        return next_marked(text, at, START, read)


def _end(text: str, at: int) -> int:
    """Return the end of the element whose JSON ends at `at`. The end marker may be incomplete or missing."""
    match = _REST.match(text, at)
    marker = at if match is None else match.end()
    if text.startswith(END, marker):
        return marker + len(END)
    return len(text) if END.startswith(text[marker:]) else at
