"""Building blocks of request body schemas. Types are strict, and unknown fields are errors.

A null field counts as missing, and so does a field that cannot change the output.
"""

from collections.abc import Mapping
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
        meaningless: values, by field, that ask for nothing.
        refused: known fields that this server does not support, each with advice.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignored: ClassVar[frozenset[str]] = frozenset()
    meaningless: ClassVar[Mapping[str, tuple[Json, ...]]] = {}
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_effect(cls, fields: Json) -> Json:
        if type(fields) is not dict:
            return fields
        return {name: value for name, value in cast(dict[str, Json], fields).items() if cls.has_effect(name, value)}

    @classmethod
    def has_effect(cls, name: str, value: Json) -> bool:
        """Return whether the field `name` with this value asks for anything."""
        values = cls.meaningless.get(name, ())
        has_none = value is None or any(type(value) is type(one) and value == one for one in values)
        return not has_none and name not in cls.ignored


class ModelBody(Strict):
    """A request body, which names the model that it is for."""

    model: str


def _as_int(value: Json) -> Json:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_as_int)]  # many clients write whole numbers with a decimal point


def complaint(sentence: str) -> PydanticCustomError:
    """Return a validation error about one value. In the sentence, {place} and {given} stand for its place and text."""
    return PydanticCustomError("complaint", cast(LiteralString, sentence))


def conflict(name: str, sentence: str) -> PydanticCustomError:
    """Return a validation error about several fields, of which `name` is to blame."""
    return PydanticCustomError(cast(LiteralString, name), "{sentence}", {"sentence": sentence})
