"""Request body schemas: the fields of all APIs, those of completions and chats, and those of completions only."""

from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from jspec.core.types import Json
from jspec.serve.fields import MOST, ModelBody, Strict, WholeNumber, invalid_fields, invalid_value

_Ids = Annotated[list[Annotated[WholeNumber, Field(ge=0, le=MOST)]], Field(max_length=64)]


def _texts(value: Json) -> Json:
    texts = [value] if isinstance(value, str) else value
    if isinstance(texts, list) and all(isinstance(text, str) and text for text in texts):
        return texts
    raise invalid_value("{place} must be a non-empty string or a list of non-empty strings; got {given}")


def _prompts(value: Json) -> Json:
    """Convert one prompt, or a list of prompts, to a list of strings and token-id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value) or all(_is_ids(one) for one in value):
            return value
        if _is_ids(value):
            return [value]
    raise invalid_value(
        "{place} must be a string, or a non-empty list of strings, of token ids or of non-empty token-id lists; "
        "got {given}"
    )


def _is_ids(value: Json) -> bool:
    return isinstance(value, list) and value != [] and all(type(one) is int for one in value)


class StreamOptions(Strict):
    """The options of a streaming response."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """The JSON schema of a response format.

    The schema is enforced whether or not `strict` is set. The name and the description are only for human readers.
    """

    name: str = Field("", max_length=64)
    description: str = ""
    strict: bool = True
    definition: dict[str, object] = Field(alias="schema")


class ResponseFormat(Strict):
    """The output format: any text, any JSON object, JSON that satisfies a schema, or text that matches a regex."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = Field(None, min_length=1, max_length=10_000)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        given = {"json_schema": self.json_schema, "regex": self.regex}
        for name in ("json_schema", "regex"):
            if (given[name] is not None) != (self.type == name):
                raise invalid_fields(
                    "response_format", f"response_format must have {name} if, and only if, its type is {name!r}"
                )
        return self

    @property
    def output_schema(self) -> dict[str, object]:
        """The schema of JSON output."""
        return self.json_schema.definition if self.json_schema else {"type": "object"}


class DecodingBody(ModelBody):
    """The fields common to all requests for text: how tokens are sampled, and where the output ends."""

    no_effect = MappingProxyType(
        {"stop": ("",), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,)}
    )

    temperature: float | None = Field(None, ge=0, le=100)  # None, here and below, means the model's own default
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: WholeNumber | None = Field(None, ge=-1, le=MOST)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict[str, float])
    seed: WholeNumber | None = Field(None, ge=-(2**63), le=2**64 - 1)
    stop: Annotated[list[Annotated[str, Field(max_length=1000)]], BeforeValidator(_texts), Field(max_length=16)] = (
        Field(default_factory=list[str])
    )
    stop_token_ids: _Ids = Field(default_factory=list[int])
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: WholeNumber = Field(0, ge=0, le=MOST)
    stream: bool = False
    cache_salt: str = Field("", max_length=256)


class Body(DecodingBody):
    """The fields common to completion and chat requests."""

    ignored = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "prediction"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "reasoning_effort", "verbosity"),
        }
    )

    max_tokens: WholeNumber | None = Field(None, ge=0, le=MOST)
    n: WholeNumber = Field(1, ge=1, le=128)
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_origins: bool = False

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid_fields("stream_options", "stream_options requires streaming; set stream to true")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise invalid_fields("min_tokens", "min_tokens is greater than max_tokens; reduce min_tokens")
        if self.is_formatted and (self.ignore_eos or self.min_tokens):
            raise invalid_fields(
                "response_format",
                "response_format determines where the output ends; omit ignore_eos and min_tokens",
            )
        return self

    @property
    def is_formatted(self) -> bool:
        """Whether the format constrains the output."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def constrained_by(self) -> str:
        """The field that constrains the output, or an empty string."""
        return "response_format" if self.is_formatted else ""


class CompletionBody(Body):
    """The body of /v1/completions."""

    no_effect = MappingProxyType({**Body.no_effect, "suffix": ("",), "logprobs": (False,), "tools": ([],)})
    unsupported = MappingProxyType(dict.fromkeys(("suffix", "tools", "tool_choice", "functions"), "omit this field"))

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    max_tokens: WholeNumber | None = Field(16, ge=0, le=MOST)
    echo: bool = False
    logprobs: WholeNumber | None = Field(None, ge=0, le=20)
    best_of: WholeNumber | None = Field(None, ge=1, le=128)

    @model_validator(mode="after")
    def _can_be_served(self) -> Self:
        if self.best_of not in (None, self.n):
            raise invalid_fields("best_of", "best_of must equal n, because no choice is discarded; omit best_of")
        if self.max_tokens == 0 and not self.echo:
            raise invalid_fields(
                "max_tokens", "max_tokens is 0, which requires echo; set max_tokens to 1 or more, or set echo to true"
            )
        return self
