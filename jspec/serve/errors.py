"""Errors in the format that OpenAI clients expect."""

import dataclasses
from collections.abc import Mapping
from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclasses.dataclass
class Refusal(Exception):
    """The refusal of a request, with the reason in one sentence.

    Attributes:
        status: the HTTP status.
        message: the sentence.
        param: the field that the error is about.
        code: a word for programs.
        headers: headers of the response.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the body of the response, or the data of a stream's event."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, usual)
        param = self.param and _short(self.param)
        return {"error": {"message": _short(self.message), "type": kind, "param": param, "code": self.code}}


def wrong(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """Return the refusal of an invalid request. The message may quote the request; it is made one short sentence."""
    message = _short(" ".join(message.split()))
    return Refusal(400, message if message.endswith(".") else f"{message}.", param, code)


def _short(text: str) -> str:
    """Cut the text to a line, because it may quote what a client has sent."""
    return text if len(text) < 300 else f"{text[:297]}..."


def busy(message: str) -> Refusal:
    """Return the refusal of a request that the client may send again soon."""
    return Refusal(429, message, code="queue_full", headers={"Retry-After": "1"})


def draining() -> Refusal:
    """Return the refusal of a request that arrives too late, while the server shuts down."""
    return Refusal(503, "The server is shutting down; send the request to another one.", code="shutting_down")


def failed() -> Refusal:
    """Return the refusal of a request whose text cannot continue. Only the log says why, not the response."""
    return Refusal(500, "The engine failed while the request was running; send it again.", code="engine_failed")
