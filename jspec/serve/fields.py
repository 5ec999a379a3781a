"""Building blocks of request body schemas. Types are strict, and unknown fields are errors.

Null fields, and fields that cannot change the output, count as missing.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, LiteralString, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from jspec.core.types import Json

MOST = 2**31 - 1
MOST_MESSAGES, MOST_PARTS, MOST_TOOLS = 1024, 64, 128


class Strict(BaseModel):
    """An object in a request body.

    Attributes:
        ignored: fields whose values never change the output.
        no_effect: by field, values that do not change the output.
        unsupported: known fields that this server does not support, each with advice.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    no_effect: ClassVar[Mapping[str, tuple[Json, ...]]] = {}
    unsupported: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, fields: Json) -> Json:
        if type(fields) is not dict:
            return fields
        return {name: value for name, value in cast(dict[str, Json], fields).items() if cls.has_effect(name, value)}

    @classmethod
    def has_effect(cls, name: str, value: Json) -> bool:
        """Return whether the field `name` has an effect with this value."""
        values = cls.no_effect.get(name, ())
        is_default = value is None or any(type(value) is type(other) and value == other for other in values)
        return not is_default and name not in cls.ignored


class ModelBody(Strict):
    """A request body, which names the model that it is for."""

    model: str


def _as_int(value: Json) -> Json:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_as_int)]  # many clients write whole numbers with a decimal point


def text_parts(kind: str) -> Callable[[Json], Json]:
    """Return a function that converts a string to a list of one part, and refusal parts to text parts.

    Args:
        kind: the type of text parts.
    """

    def text_part(part: Json) -> Json:
        if isinstance(part, dict) and part.get("type") == "refusal" and part.keys() == {"type", "refusal"}:
            return {"type": kind, "text": part["refusal"]}
        return part

    def parts(value: Json) -> Json:
        if isinstance(value, str):
            return [{"type": kind, "text": value}]
        return [text_part(part) for part in value] if isinstance(value, list) else value

    return parts


def invalid_value(sentence: str) -> PydanticCustomError:
    """Return a validation error about one value.

    In the sentence, {place} and {given} are replaced by the place and the text of the value.
    """
    return PydanticCustomError("invalid_value", cast(LiteralString, sentence))


def invalid_fields(name: str, sentence: str) -> PydanticCustomError:
    """Return a validation error about several fields. The response names the field `name` as the cause."""
    return PydanticCustomError(cast(LiteralString, name), "{sentence}", {"sentence": sentence})
