"""Validation of a request body. The first error is reported in one sentence."""

import reprlib
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jspec.core.types import Json
from jspec.serve.errors import Refusal, wrong
from jspec.serve.fields import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS, Strict

_MOST_FIELDS, _MOST_BIASES = 64, 4096
AnyBody = TypeVar("AnyBody", bound=Strict)


class _Short(reprlib.Repr):
    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """Return the representation of a dict, without sorting all keys of a large one."""
        return "{...}" if len(x) > self.maxdict else super().repr_dict(x, level)


_SHORT = _Short()


def validated(kind: type[AnyBody], fields: Json) -> AnyBody:
    """Validate `fields`, and return them as a body of type `kind`.

    Raises:
        Refusal: the body is invalid; the message describes the first error.
    """
    if not isinstance(fields, dict):
        raise wrong(f"The body is {_SHORT.repr(fields)}; expected a JSON object.")
    _check_sizes(fields)
    for name, advice in kind.unsupported.items():
        if kind.has_effect(name, fields.get(name)):
            raise wrong(f"{name} is not supported by this server; {advice}.", name, "unsupported")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from None


def _check_sizes(fields: dict[str, Json]) -> None:
    """Reject bodies with too many small values before validation reports an error for each of them."""

    def objects_in(value: Json, most: int = MOST_MESSAGES) -> list[dict[str, Json]]:
        items = value if isinstance(value, list) and len(value) <= most else []
        return [item for item in items if isinstance(item, dict)]

    messages = objects_in(fields.get("messages")) + objects_in(fields.get("input"))
    parts = [
        part
        for message in messages
        for name in ("content", "output")
        for part in objects_in(message.get(name), MOST_PARTS)
    ]
    parts += [call for message in messages for call in objects_in(message.get("tool_calls"), MOST_TOOLS)]
    tools = objects_in(fields.get("tools"), MOST_TOOLS)
    parts += objects_in([part.get("function") for part in (*parts, *tools)], MOST_MESSAGES * MOST_PARTS)
    names = ("response_format", "stream_options", "chat_template_kwargs", "text", "tool_choice", "metadata")
    others = objects_in([fields.get(name) for name in names])
    schemas = objects_in([options.get(name) for options in others for name in ("json_schema", "format")])
    most = max(map(len, (fields, *messages, *tools, *parts, *others, *schemas)))
    if most > _MOST_FIELDS:
        raise wrong(f"An object in the body has {most} fields; expected at most {_MOST_FIELDS}.")
    biases = fields.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
        raise wrong(f"logit_bias has {len(biases)} tokens; expected at most {_MOST_BIASES}.", "logit_bias")


def _refusal(error: ErrorDetails) -> Refusal:
    """Return the `Refusal` for an error found by pydantic, in one sentence."""
    place = _place(error["loc"])
    kind, message, given = error["type"], error["msg"], _SHORT.repr(error["input"])
    if kind == "missing":
        return wrong(f"{place} is missing; add this field.", place)
    if kind == "extra_forbidden":
        return wrong(
            f"{place or repr(place)} is not a field that this server supports; omit this field.", place, "unknown_field"
        )
    if place.endswith(".type") and place.startswith("messages"):
        return wrong(f"{place} is {given}, but only parts of type 'text' are supported.", place, "unsupported")
    if kind == "invalid_value":
        return wrong(f"{message.replace('{place}', place).replace('{given}', given)}.", place)
    if not place or kind == "response_format":  # an error about several fields
        return wrong(f"{message}.", kind)
    if kind in ("too_short", "too_long", "string_too_long"):
        words = message.replace(" after validation", "").split(" ", 1)[1]
        return wrong(f"{place} {words}.", place)
    return wrong(f"{place} is {given}; expected {_expected(kind, message)}.", place)


def _expected(kind: str, message: str) -> str:
    if kind in ("model_type", "dict_type"):
        return "an object"
    expected = message.removeprefix("Input should be ")
    return f"a number {expected}" if expected.startswith(("greater", "less")) else expected


def _place(path: tuple[int | str, ...]) -> str:
    """Join the parts of a path, as in ``messages[0].content``. Union alternatives, such as "<message>", add no name."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif text.endswith("]") and part.startswith("<"):
            continue
        elif part != "str" and not part.startswith("list["):
            text += f".{part}" if text else part
    return text
