"""The format of Llama 3.1 and later: the whole output is ``{"name": ..., "parameters": {...}}``."""

import re
from collections.abc import Collection

from jspec.serve.tools.call_json import ParseResult, parse_call
from jspec.serve.tools.tool_format import CallSpan, Notation, ToolFormat, next_marked

TAG = "<|python_tag|>"
_FIRST, _NEXT, _END = (re.compile(pattern) for pattern in (r"\s*+", r"\s*+;?\s*+", r"\s*+;?\s*+\Z"))


class Llama3(ToolFormat):
    """Calls as JSON objects at the start of the output, separated by semicolons, or anywhere after a tag."""

    name = "llama3"
    special_tokens = (TAG,)
    notation = Notation('{"name": "', '", "parameters": ', "}", between="; ")
    optional_opening = TAG
    plain_start = r"[^\s{]"

    def next_call(self, text: str, at: int, names: Collection[str]) -> CallSpan | None:
        """Return the first call at or after a position, or the first text that may become one."""

        def read(text: str, at: int) -> ParseResult:
            result = parse_call(text, at, names, is_marked=False)
            is_last = result.call is not None and _END.match(text, result.end)
            return ParseResult(result.call, len(text)) if is_last else result

        match = (_NEXT if at else _FIRST).match(text, at)
        start = at if match is None else match.end()
        if text.startswith("{", start):
            result = read(text, start)
            if result.call is not None or result.is_undecided:
                return CallSpan(at, result.end, result.call)
            return next_marked(text, result.end, TAG, read)
        return next_marked(text, at, TAG, read)
