"""The APIs that generate text: the schemas of their requests, and their response formats."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from jspec.core.types import Json
from jspec.serve.answers import Answer
from jspec.serve.chat_schemas import ChatBody
from jspec.serve.errors import Refusal
from jspec.serve.fields import ModelBody
from jspec.serve.job import Job
from jspec.serve.response_items import ResponsesAnswer
from jspec.serve.responses_schemas import ResponsesBody, as_chat, renamed
from jspec.serve.schemas import Body, CompletionBody
from jspec.serve.sse import StreamedAnswer

_T = TypeVar("_T")


class AnyAnswer(StreamedAnswer, Protocol):
    """A response in the format of one API."""

    def whole(self) -> dict[str, Json]:
        """Return the whole response. All choices must have ended."""
        ...


@dataclasses.dataclass(frozen=True)
class Api:
    """One API.

    Attributes:
        kind: the schema of request bodies.
        as_body: a function that converts a request body to a completion or chat body.
        answer: a function that returns the response of a job, given the job and the request body.
        renamed: a function that puts this API's field names into a refusal of the converted body.
    """

    kind: type[ModelBody]
    as_body: Callable[[Any], Body]
    answer: Callable[[Job, Any], AnyAnswer]
    renamed: Callable[[Refusal], Refusal]


def _same(value: _T) -> _T:
    return value


def _answer(job: Job, body: Body) -> Answer:
    return Answer(job)


APIS = {
    "/v1/completions": Api(CompletionBody, _same, _answer, _same),
    "/v1/chat/completions": Api(ChatBody, _same, _answer, _same),
    "/v1/responses": Api(ResponsesBody, as_chat, ResponsesAnswer, renamed),
}
