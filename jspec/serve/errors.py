"""What is refused, in the shape that OpenAI's clients read."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclasses.dataclass
class Refusal(Exception):
    """A request that is not served, and why, in one sentence.

    Attributes:
        status: of HTTP.
        message: the sentence.
        param: which field it is about.
        code: a word for programs.
        headers: of the answer.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The body of the answer, or an event of a stream."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        param = self.param and _short(self.param)
        return {"error": {"message": _short(self.message), "type": kind, "param": param, "code": self.code}}


def wrong(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """Of a request that cannot be right; the message, which may quote it, is made one short sentence."""
    message = _short(" ".join(message.split()))
    return Refusal(400, message if message.endswith(".") else f"{message}.", param, code)


def _short(text: str) -> str:
    """Of what a client has sent no more than a line is sent back."""
    return text if len(text) < 300 else f"{text[:297]}..."


def busy(message: str) -> Refusal:
    """Of one that may be sent again soon."""
    return Refusal(429, message, code="queue_full", headers={"Retry-After": "1"})


def draining() -> Refusal:
    """Of one that comes too late."""
    return Refusal(503, "The server is shutting down; send the request to another one.", code="shutting_down")


def failed() -> Refusal:
    """Of one whose text cannot go on; the log says why, and it concerns nobody outside."""
    return Refusal(500, "The engine failed while the request was running; send it again.", code="engine_failed")
