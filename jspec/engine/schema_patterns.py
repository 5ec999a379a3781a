"""Regular expressions of JSON schemas, in a form that llguidance enforces."""

import re

_PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|[^{])")
_MAY_HAVE_CONTROLS = re.compile(r"\[\^|\\[xupP]|.\[|\x00", re.DOTALL)


def without_nul(pattern: str) -> str:
    r"""Return a pattern whose classes exclude NUL, which no string can contain, because ``\u`` escapes are disabled.

    If a class contains all control characters, llguidance lets it match quotes and backslashes, too: ``[^"]`` would
    match a quote.
    """
    parts: list[str] = []
    i = 0
    while i < len(pattern):
        if pattern[i] == "[":
            end = _class_end(pattern, i)
            part = pattern[i:end]
            may_match = end <= len(pattern) and _MAY_HAVE_CONTROLS.search(part)
        else:
            match = _PROPERTY.match(pattern, i)
            end = match.end() if match else i + 1 + (pattern[i] == "\\")
            part, may_match = pattern[i:end], match
        parts.append(f"[{part}&&[^\\x00]]" if may_match else part)
        i = end
    return "".join(parts)


def _class_end(pattern: str, i: int) -> int:
    """Return the end of the class that begins at `i`, or more than the length of the pattern if it has no end."""
    depth = 0
    while i < len(pattern):
        if pattern[i] == "[":
            depth += 1
            i += pattern[i + 1 : i + 2] == "^"
            i += pattern[i + 1 : i + 2] == "]"  # at the beginning, it is a character
        elif pattern[i] == "]":
            depth -= 1
            if not depth:
                return i + 1
        i += 1 + (pattern[i] == "\\")
    return len(pattern) + 1
