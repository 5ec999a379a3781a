"""The APIs that generate text: how each reads requests and writes responses."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from jspec.core.types import Json
from jspec.serve.chat_schemas import ChatBody
from jspec.serve.fields import ModelBody
from jspec.serve.job import Job
from jspec.serve.responses import Answer
from jspec.serve.schemas import Body, CompletionBody
from jspec.serve.sse import StreamedAnswer


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
        as_body: a function that converts a request body to one that can be decoded.
        answer: a function that returns the response of a job, given the job and the request body.
    """

    kind: type[ModelBody]
    as_body: Callable[[Any], Body]
    answer: Callable[[Job, Any], AnyAnswer]


def _same(body: Body) -> Body:
    return body


def _answer(job: Job, body: Body) -> Answer:
    return Answer(job)


APIS = {
    "/v1/completions": Api(CompletionBody, _same, _answer),
    "/v1/chat/completions": Api(ChatBody, _same, _answer),
}
