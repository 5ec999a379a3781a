"""Request body schemas. Types are strict, unknown fields are errors, and a null field counts as missing."""

import reprlib
from typing import Annotated, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from jspec.core.types import Json
from jspec.serve.errors import Refusal, wrong

# Fields of OpenAI's API that are known but not supported.
_REFUSED = (
    *("suffix", "tools", "tool_choice", "parallel_tool_calls", "functions"),
    *("function_call", "modalities", "audio", "prediction", "web_search_options", "images"),
)
_MOST = 2**31 - 1
_MOST_MESSAGES, _MOST_PARTS, _MOST_FIELDS, _MOST_BIASES = 1024, 64, 64, 4096
_Ids = Annotated[list[Annotated[int, Field(ge=0, le=_MOST)]], Field(max_length=64)]


class _Short(reprlib.Repr):
    def repr_dict(self, x: dict[object, object], level: int) -> str:
        """Return the representation of a dict, without sorting all keys of a large one."""
        return "{...}" if len(x) > self.maxdict else super().repr_dict(x, level)


_SHORT = _Short()


def _texts(value: Json) -> Json:
    several = [value] if isinstance(value, str) else value
    if isinstance(several, list) and all(isinstance(one, str) and one for one in several):
        return several
    raise PydanticCustomError("stop", "{place} must be a non-empty string or a list of non-empty strings")


def _prompts(value: Json) -> Json:
    """Convert one prompt, or a list of prompts, to a list of strings and token-id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value) or all(_is_ids(one) for one in value):
            return value
        if _is_ids(value):
            return [value]
    raise PydanticCustomError(
        "prompt",
        "{place} must be a string, or a non-empty list of strings, of token ids or of non-empty token-id lists",
    )


def _parts(value: Json) -> Json:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _is_ids(value: Json) -> bool:
    return isinstance(value, list) and value != [] and all(type(one) is int for one in value)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Json) -> Json:
        return (
            {name: value for name, value in cast(dict[str, Json], fields).items() if value is not None}
            if type(fields) is dict
            else fields
        )


class StreamOptions(_Strict):
    """The options of a streaming response."""

    include_usage: bool = False


class JsonSchema(_Strict):
    """The JSON schema of a response format.

    The schema is enforced whether or not `strict` is set. The name and the description are only for human readers.
    """

    name: str = Field("", max_length=64)
    description: str = ""
    strict: bool = True
    held: dict[str, object] = Field(alias="schema")


class ResponseFormat(_Strict):
    """The output format: any text, any JSON object, JSON that fits a schema, or text that fits a regular expression."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, min_length=1, max_length=10_000)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        given = {"json_schema": self.json_schema, "regex": self.regex}
        for name in ("json_schema", "regex"):
            if (given[name] is not None) != (self.type == name):
                raise PydanticCustomError(
                    "response_format", f"response_format must have {name} if, and only if, its type is {name!r}"
                )
        return self


class Body(_Strict):
    """The fields common to completion and chat requests."""

    model: str
    max_tokens: int | None = Field(None, ge=0, le=_MOST)
    temperature: float | None = Field(None, ge=0, le=100)  # None, here and below, means the model's own default
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_MOST)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: int | None = Field(None, ge=0, le=2**32 - 1)
    n: int = Field(1, ge=1, le=128)
    stop: Annotated[list[Annotated[str, Field(max_length=1000)]], BeforeValidator(_texts), Field(max_length=16)] = []
    stop_token_ids: _Ids = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, le=_MOST)
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_origins: bool = False
    cache_salt: str = Field("", max_length=256)
    user: str = ""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options requires streaming; set stream to true")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise PydanticCustomError("min_tokens", "min_tokens is greater than max_tokens; reduce min_tokens")
        if self.is_formatted and (self.ignore_eos or self.min_tokens):
            raise PydanticCustomError(
                "response_format",
                "response_format determines where the output ends; omit ignore_eos and min_tokens",
            )
        return self

    @property
    def is_formatted(self) -> bool:
        """Whether the format constrains the output."""
        return self.response_format is not None and self.response_format.type != "text"


class CompletionBody(Body):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    max_tokens: int | None = Field(16, ge=0, le=_MOST)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=128)

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.best_of not in (None, self.n):
            raise PydanticCustomError("best_of", "best_of must equal n, because no choice is discarded; omit best_of")
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "max_tokens", "max_tokens is 0, which requires echo; set max_tokens to 1 or more, or set echo to true"
            )
        return self


class Part(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """A message of a conversation."""

    role: str
    content: Annotated[list[Part], FailFast(), BeforeValidator(_parts), Field(max_length=_MOST_PARTS)]

    def plain(self) -> dict[str, str]:
        """Return the message in the form that chat templates expect."""
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1, max_length=_MOST_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=_MOST)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MOST)
    chat_template_kwargs: dict[str, object] = {}
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs requires logprobs; set logprobs to true")
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise PydanticCustomError(
                    "max_tokens", "max_tokens and max_completion_tokens differ; send only one of these fields"
                )
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise PydanticCustomError(
                "min_tokens", "min_tokens is greater than max_completion_tokens; reduce min_tokens"
            )
        return self


def understood(kind: type[Body], fields: Json) -> Body:
    """Validate `fields`, and return them as a body of type `kind`.

    Raises:
        Refusal: the body is invalid; the message describes the first error.
    """
    if not isinstance(fields, dict):
        raise wrong(f"The body is {_SHORT.repr(fields)}; expected a JSON object.")
    _check_sizes(fields)
    for name in _REFUSED:
        if fields.get(name) is not None:
            raise wrong(f"{name} is not supported by this server; omit this field.", name, "unsupported")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from None


def _check_sizes(fields: dict[str, Json]) -> None:
    """Reject bodies with too many small values before validation reports an error for each of them."""

    def of(value: Json, most: int = _MOST_MESSAGES) -> list[dict[str, Json]]:
        return [one for one in value if isinstance(one, dict)] if isinstance(value, list) and len(value) <= most else []

    messages = of(fields.get("messages"))
    parts = [part for one in messages for part in of(one.get("content"), _MOST_PARTS)]
    others = of([fields.get(name) for name in ("response_format", "stream_options", "chat_template_kwargs")])
    schemas = of([one.get("json_schema") for one in others])
    most = max(map(len, (fields, *messages, *parts, *others, *schemas)))
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
    if kind in ("prompt", "stop"):
        return wrong(f"{message.replace('{place}', place)}; got {given}.", place)
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
