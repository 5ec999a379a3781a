"""Validation of a request body, with the first error in one sentence."""

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


def understood(kind: type[AnyBody], fields: Json) -> AnyBody:
    """Validate `fields`, and return them as a body of type `kind`.

    Raises:
        Refusal: the body is invalid; the message describes the first error.
    """
    if not isinstance(fields, dict):
        raise wrong(f"The body is {_SHORT.repr(fields)}; expected a JSON object.")
    _check_sizes(fields)
    for name, advice in kind.refused.items():
        if kind.has_effect(name, fields.get(name)):
            raise wrong(f"{name} is not supported by this server; {advice}.", name, "unsupported")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from None


def _check_sizes(fields: dict[str, Json]) -> None:
    """Reject bodies with too many small values before validation reports an error for each of them."""

    def of(value: Json, most: int = MOST_MESSAGES) -> list[dict[str, Json]]:
        return [one for one in value if isinstance(one, dict)] if isinstance(value, list) and len(value) <= most else []

    messages = of(fields.get("messages"))
    parts = [part for one in messages for part in of(one.get("content"), MOST_PARTS)]
    parts += [call for one in messages for call in of(one.get("tool_calls"), MOST_TOOLS)]
    tools = of(fields.get("tools"), MOST_TOOLS)
    parts += of([part.get("function") for part in (*parts, *tools)], MOST_MESSAGES * MOST_PARTS)
    others = of([fields.get(name) for name in ("response_format", "stream_options", "chat_template_kwargs")])
    schemas = of([one.get("json_schema") for one in others])
    most = max(map(len, (fields, *messages, *tools, *parts, *others, *schemas)))
    if most > _MOST_FIELDS:
        raise wrong(f"An object in the body has {most} fields; expected at most {_MOST_FIELDS}.")
    biases = fields.get("logit_bias")
    if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
        raise wrong(f"logit_bias has {len(biases)} tokens; expected at most {_MOST_BIASES}.", "logit_bias")


def _refusal(found: ErrorDetails) -> Refusal:
    """Return the `Refusal` for an error found by pydantic, in one sentence."""
    place = _place(found["loc"])
    kind, message, given = found["type"], found["msg"], _SHORT.repr(found["input"])
    if kind == "missing":
        return wrong(f"{place} is missing; add this field.", place)
    if kind == "extra_forbidden":
        return wrong(f"{place} is not a field that this server supports; omit this field.", place, "unknown_field")
    if place.endswith(".type") and place.startswith("messages"):
        return wrong(f"{place} is {given}, but only parts of type 'text' are supported.", place, "unsupported")
    if kind == "complaint":
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
    """Join the parts of a path, as in ``messages[0].content``. Union alternatives add no name."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "str" and not part.startswith("list["):
            text += f".{part}" if text else part
    return text
