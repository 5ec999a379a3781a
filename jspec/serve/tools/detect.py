"""Detection of a model's tool-call format from its chat template, and conversion of conversations for templates."""

import dataclasses
import functools
import hashlib
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import cast

from jspec.core.tokenizer import Tokenizer
from jspec.core.types import Json
from jspec.serve.tools.hermes import Hermes
from jspec.serve.tools.llama3 import Llama3
from jspec.serve.tools.mistral import ARGS, START, Mistral, MistralArgs, is_mistral_id
from jspec.serve.tools.tool_format import FunctionTool, ToolCall, ToolFormat
from jspec.text.render_template import render_template

_NAME, _PARAMETER, _CALL_ID = "jspec_probe", "jspec_parameter", "jspecCall"
_QUESTION, _RESULT, _SYSTEM = "jspec-question", "jspec-result", "jspec-system"
_TOOL = FunctionTool(
    _NAME,
    "jspec-description",
    {"type": "object", "properties": {_PARAMETER: {"type": "string", "description": "jspec"}}},
    is_strict=False,
)
_CALL = ToolCall(_NAME, '{"place": "here"}')
_USER: dict[str, object] = {"role": "user", "content": _QUESTION}
_PROBE_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": _NAME, "arguments": json.loads(_CALL.arguments)},
}
_CONVERSATION: list[dict[str, object]] = [
    _USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [_PROBE_CALL],
    },
    {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _RESULT},
]


@dataclasses.dataclass(frozen=True)
class ToolSupport:
    """How a model's template and output represent tools.

    Attributes:
        format: the format of calls in the output; None if the template writes calls in an unknown notation.
        is_native: whether the template describes the tools in the prompt. If not, `messages` describes them.
        takes_system: whether the template accepts a system message.
        takes_several: whether the template accepts several calls in one message. Llama 3's templates do not.
    """

    format: ToolFormat | None
    is_native: bool
    takes_system: bool = True
    takes_several: bool = True

    @property
    def note(self) -> str:
        """A sentence about what the chat template lacks, or an empty string."""
        if self.format is None:
            return "Tools are not supported: the model's chat template writes calls in an unknown notation."
        if self.is_native:
            return ""
        return (
            "The model's chat template has no tools; the server describes them in a system message, in Hermes notation."
        )

    def messages(self, messages: Sequence[Mapping[str, Json]], tools: Sequence[FunctionTool]) -> list[dict[str, Json]]:
        """Return the messages as the template expects them.

        Args:
            messages: messages in OpenAI's form. Each content is a string, and arguments are JSON text.
            tools: the functions that the model may call.

        Raises:
            ValueError: the arguments of a call do not begin a JSON object. The message names the call.
        """
        if self.is_native:
            native = _native(messages, isinstance(self.format, Mistral))
            return native if self.takes_several else _one_by_one(native)
        written = _written(messages, cast(ToolFormat, self.format))
        return _described(written, tools, self.takes_system) if tools else written


def detect_tool_support(tokenizer: Tokenizer) -> ToolSupport:
    """Return how the tokenizer's chat template represents tools.

    The Hermes format is the fallback if the template is missing or ignores tools.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return ToolSupport(Hermes(), is_native=False)
    render = functools.partial(_rendered, tokenizer, template)
    if _PARAMETER in render([_USER], [_TOOL.as_json()]):
        form = _detect_format(render(_CONVERSATION, [_TOOL.as_json()]))
        several = [_USER, _CONVERSATION[1] | {"tool_calls": 2 * [_PROBE_CALL]}]
        return ToolSupport(form, is_native=True, takes_several=render(several).count(_NAME) == 2)
    takes_system = _SYSTEM in render([{"role": "system", "content": _SYSTEM}, _USER])
    return ToolSupport(Hermes(), is_native=False, takes_system=takes_system)


def _rendered(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] | None = None,
) -> str:
    """Return the rendered conversation, or "" if the template rejects it."""
    try:
        return render_template(tokenizer, template, messages, tools)
    except Exception:  # templates may raise anything
        return ""


def _detect_format(text: str) -> ToolFormat | None:
    """Return the format that parses the call in the rendered conversation, or None."""
    answer = text.rpartition(_QUESTION)[2].partition(_RESULT)[0]
    brace = answer.find("{")  # Llama's calls have no marker, so special tokens of the template precede them
    candidates: list[tuple[ToolFormat, str, bool]] = [
        (MistralArgs(), answer, ARGS in answer),
        (Mistral(has_space=f"{START} " in answer), answer, True),
        (Hermes(), answer, True),
        (Llama3(), answer[brace:], '"parameters"' in answer and brace >= 0),
    ]
    for form, written, is_possible in candidates:
        calls = form.parse(written, {_NAME}, is_complete=True).calls if is_possible else ()
        if [(call.name, json.loads(call.arguments)) for call in calls] == [(_NAME, json.loads(_CALL.arguments))]:
            return form
    return None


def _native(messages: Sequence[Mapping[str, Json]], is_mistral: bool) -> list[dict[str, Json]]:
    """Return messages with arguments as objects if possible, and with the called function's name in every result."""
    names: dict[Json, Json] = {}
    converted: list[dict[str, Json]] = []
    for i, message in enumerate(messages):
        fields = dict(message)
        calls = _calls(fields.pop("tool_calls", None))
        if calls:
            fields["tool_calls"] = [
                _native_call(call, f"messages[{i}].tool_calls[{j}]", is_mistral) for j, call in enumerate(calls)
            ]
            names |= {call.get("id"): _function(call).get("name") for call in calls}
        given = fields.get("tool_call_id")
        if given in names:
            fields.setdefault("name", names[given])
        if is_mistral and isinstance(given, str):
            fields["tool_call_id"] = _mistral_id(given)
        converted.append(fields)
    return converted


def _one_by_one(messages: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return messages with one call each. Each call is followed by its result."""
    ordered: list[dict[str, Json]] = []
    results: list[dict[str, Json]] = []
    for message in reversed(messages):
        if message["role"] == "tool":
            results.insert(0, message)
            continue
        split = [{**message, "tool_calls": [call]} for call in _calls(message.get("tool_calls"))] or [message]
        placed: list[dict[str, Json]] = []
        for i, part in enumerate(split):
            ids = [call.get("id") for call in _calls(part.get("tool_calls"))]
            own = [result for result in results if result.get("tool_call_id") in ids]
            results = [result for result in results if result not in own]
            placed += [part if i == 0 else {**part, "content": ""}, *own]
        ordered = [*placed, *results, *ordered]
        results = []
    return [*results, *ordered]


def _native_call(call: Mapping[str, Json], place: str, is_mistral: bool) -> dict[str, Json]:
    function = _function(call)
    fields = {**call, "function": {**function, "arguments": _arguments(function, place)}}
    given = call.get("id")
    return fields | {"id": _mistral_id(given)} if is_mistral and isinstance(given, str) else fields


def _mistral_id(text: str) -> str:
    """Return an id that Mistral's templates accept. The same text always gives the same id."""
    return text if is_mistral_id(text) else hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:9]


def _written(messages: Sequence[Mapping[str, Json]], form: ToolFormat) -> list[dict[str, Json]]:
    """Return messages in which calls and results are text."""
    written: list[dict[str, Json]] = []
    for i, message in enumerate(messages):
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if i and messages[i - 1]["role"] == "tool":
                written[-1]["content"] = f"{written[-1]['content']}\n{text}"
            else:
                written.append({"role": "user", "content": text})
            continue
        fields = {name: value for name, value in message.items() if name != "tool_calls"}
        calls = [
            _written_call(_function(call), f"messages[{i}].tool_calls[{j}]")
            for j, call in enumerate(_calls(message.get("tool_calls")))
        ]
        if calls:
            fields["content"] = "\n".join(filter(None, (str(message["content"]), form.notation.write(calls))))
        written.append(fields)
    return written


def _written_call(function: Mapping[str, Json], place: str) -> ToolCall:
    arguments = _arguments(function, place)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(function["name"]), text)


def _described(
    messages: Sequence[dict[str, Json]], tools: Sequence[FunctionTool], takes_system: bool
) -> list[dict[str, Json]]:
    """Return messages with a description of the tools in the first system message, or the first user message."""
    description = _description(tools)
    if takes_system and (not messages or messages[0]["role"] != "system"):
        return [{"role": "system", "content": description}, *messages]
    role = "system" if takes_system else "user"
    first = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if first is None:
        return [{"role": role, "content": description}, *messages]
    content = str(messages[first]["content"])
    parts = (content, description) if takes_system else (description, content)
    changed = {**messages[first], "content": "\n\n".join(filter(None, parts))}
    return [*messages[:first], changed, *messages[first + 1 :]]


def _description(tools: Sequence[FunctionTool]) -> str:
    listed = "\n".join(json.dumps(tool.as_json(), ensure_ascii=False) for tool in tools)
    example = Hermes.notation.write([ToolCall("FUNCTION", '{"ARGUMENT": VALUE}')])
    return (
        "# Tools\n\nYou can call functions to answer the user. These are the functions, as JSON, one on each line:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, write a JSON object with the function's name and its arguments between <tool_call> and "
        f"</tool_call>, like this:\n{example}\n\n"
        "You then receive the result between <tool_response> and </tool_response>. If no function helps, answer "
        "without a call."
    )


def _calls(value: Json) -> list[Mapping[str, Json]]:
    return cast("list[Mapping[str, Json]]", value or [])


def _function(call: Mapping[str, Json]) -> Mapping[str, Json]:
    return cast("Mapping[str, Json]", call["function"])


def _arguments(function: Mapping[str, Json], place: str) -> dict[str, Json] | str:
    """Return the arguments of a call as an object, or as text if the model wrote invalid or incomplete JSON.

    Raises:
        ValueError: the arguments are not the text of a JSON object, not even its beginning.
    """
    text = cast(str, function["arguments"]).strip() or "{}"  # many clients send "" for a call without arguments
    if not text.startswith("{"):
        raise ValueError(
            f"{place}.function.arguments is {reprlib.repr(text)}; expected the text of a JSON object, such as '{{}}'."
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
