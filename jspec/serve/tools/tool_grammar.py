"""Grammars for outputs that call functions, in llguidance's variant of Lark notation."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from jspec.core.tokenizer import Tokenizer
from jspec.core.types import Json
from jspec.engine.schema_rewrite import ONE_SPELLING
from jspec.serve.tools.tool_format import FunctionTool, ToolFormat

MOST_CALLS = 16
_COMPACT: dict[str, Json] = {"whitespace_flexible": False, **ONE_SPELLING}  # as `Grammars.json_schema` writes answers
_SPACED: dict[str, Json] = {**_COMPACT, "item_separator": ", ", "key_separator": ": "}
# The lexemes of a call's JSON in llguidance's JSON grammar.
_LEXEMES = re.compile(r'"[^"]*"|[:,] |[^][{}":,]+|.', re.DOTALL)


def marker_ids(format: ToolFormat, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the format's markers that are tokens of their own, by text.

    Markers need not be special tokens: those of Qwen 2.5 are not. However, llguidance treats all added tokens, such as
    ``<tool_call>``, as special. A grammar that spells such a marker as text would not allow the marker's token.
    """
    vocabulary = tokenizer.get_vocab()
    return {text: vocabulary[text] for text in format.special_tokens if text in vocabulary}


def text_ids(format: ToolFormat, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the added tokens that decoded text shows, such as ``<think>``, except the format's markers."""
    backend = cast("_Backend | None", getattr(tokenizer, "backend_tokenizer", None))
    added: Mapping[int, _AddedToken] = {} if backend is None else backend.get_added_tokens_decoder()
    return tuple(i for i, token in added.items() if not token.special and token.content not in format.special_tokens)


class _AddedToken(Protocol):
    """The part of a `tokenizers.AddedToken` that grammars need."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class _Backend(Protocol):
    """The part of a `tokenizers.Tokenizer` that grammars need."""

    def get_added_tokens_decoder(self) -> Mapping[int, _AddedToken]: ...


def grammar(
    format: ToolFormat,
    tools: Sequence[FunctionTool],
    *,
    tokens: Mapping[str, int],
    text_ids: Sequence[int] = (),
    is_required: bool,
    is_parallel: bool,
    answer: Json | None,
) -> str:
    """Return a Lark grammar for outputs in which every call is valid.

    A call names one of the functions, and its arguments satisfy the function's schema.

    Args:
        format: the call notation.
        tools: one or more functions.
        tokens: the ids of the markers that are tokens of their own, from `marker_ids`. Other markers are ordinary text.
        text_ids: tokens that free text may contain although llguidance treats them as special.
        is_required: whether the output consists of calls. Otherwise, it may also be text, or text and then calls. If
            calls have no marker, no text precedes them.
        is_parallel: whether the output may contain several calls, up to `MOST_CALLS`.
        answer: the JSON schema of an output without calls; None for free text. With a schema, no text precedes calls.
    """
    writer = _Writer(format, tokens, splits_json=answer is not None and not is_required)
    if is_required:
        start = ["start: calls"]
    elif answer is None:
        start = writer.text_or_calls(text_ids)
    else:
        start = ["start: calls | answer", f"answer: {_json(answer, _COMPACT)}"]
    arguments = [f"arguments_{i}: {_json(tool.schema, _SPACED)}" for i, tool in enumerate(tools)]
    return "\n".join([*start, *writer.calls([tool.name for tool in tools], is_parallel), *arguments, ""])


class _Writer:
    """A writer of the rules for calls.

    Args:
        format: the call notation.
        tokens: the ids of the markers that are tokens of their own, by text.
        splits_json: whether to write the JSON of a call as the lexemes of a JSON grammar. llguidance's lexer always
            takes the longest lexeme, so a longer literal would hide other JSON that starts with the same characters.
    """

    def __init__(self, format: ToolFormat, tokens: Mapping[str, int], splits_json: bool):
        self._format, self._tokens, self._splits_json = format, tokens, splits_json
        notation = format.notation
        start = notation.opening + notation.before_name
        self._marker = next((token for token in format.special_tokens if start.startswith(token)), "")

    def text_or_calls(self, text_ids: Sequence[int]) -> list[str]:
        """Return the start rule for text or calls, with text before the calls if they have a marker."""
        marker, plain = self._marker, self._format.plain_start
        hidden = marker or self._format.optional_opening
        text = rf"/(\s*({plain}(?s:.*))?)/" if plain else "/(?s:.*)/"
        rules = [f"TEXT: {text} & ~/(?s:.*){_escaped(hidden)}(?s:.*)/"]
        others = f"(<[{','.join(map(str, text_ids))}]> TEXT)*" if text_ids else ""
        rules.append(f"text: TEXT {others}")
        if not marker:
            return ["start: calls | text", *rules]
        if marker in self._tokens:
            return ["start: text calls | text", *rules]
        return ["start: lead rest | text", f"lead[lazy]: /(?s:.*)/ {json.dumps(marker)}", *rules]

    def calls(self, names: Sequence[str], is_parallel: bool) -> list[str]:
        """Return the rules for one or more calls."""
        notation, optional = self._format.notation, self._format.optional_opening
        more = f"({self._literal(notation.between)} call){{0,{MOST_CALLS - 1}}}" if is_parallel else ""
        before = f"{self._literal(optional)}?" if optional in self._tokens else ""
        first = (notation.opening + notation.before_name).removeprefix(self._marker)
        return [
            f"calls: {before} {self._literal(self._marker)} rest",
            f"rest: first {more} {self._literal(notation.closing)}",
            f"first: {self._alternatives(first, names)}",
            f"call: {self._alternatives(notation.before_name, names)}",
        ]

    def _alternatives(self, before_name: str, names: Sequence[str]) -> str:
        notation = self._format.notation
        after = self._literal(notation.after_arguments)
        return " | ".join(
            f"{self._literal(f'{before_name}{name}{notation.before_arguments}')} arguments_{i} {after}"
            for i, name in enumerate(names)
        )

    def _literal(self, text: str) -> str:
        """Return the grammar of a fixed text, with the markers' token ids."""
        markers = "|".join(map(re.escape, self._tokens)) or "$^"
        pieces = [piece for piece in re.split(f"({markers})", text) if piece]
        return " ".join(
            f"<[{self._tokens[piece]}]>" if piece in self._tokens else " ".join(map(json.dumps, self._lexemes(piece)))
            for piece in pieces
        )

    def _lexemes(self, text: str) -> list[str]:
        return _LEXEMES.findall(text) if self._splits_json else [text]


def _escaped(text: str) -> str:
    """Return a regular expression, to be put between slashes, that matches the text."""
    return re.escape(text).replace("/", r"\/")


def _json(schema: Json, options: Mapping[str, Json]) -> str:
    """Return the grammar of JSON that satisfies a schema."""
    fields = cast(Mapping[str, Json], schema)
    return f"%json {json.dumps({**fields, 'x-guidance': options})}"
