"""Errors in the format that OpenAI clients expect."""

import dataclasses
from collections.abc import Mapping

from jspec.core.types import Json

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclasses.dataclass
class Refusal(Exception):
    """The rejection of a request, with the reason in one sentence.

    Attributes:
        status: the HTTP status.
        message: the reason.
        param: the request field that caused the error.
        code: a machine-readable code.
        headers: the response headers.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])

    def as_json(self) -> dict[str, Json]:
        """Return the response body, which is also the data of a stream event."""
        default_kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default_kind)
        param = self.param and _short(self.param)
        return {"error": {"message": _short(self.message), "type": kind, "param": param, "code": self.code}}


def wrong(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """Return a `Refusal` for an invalid request. The message, which may quote the request, is truncated."""
    message = _short(" ".join(message.split()))
    return Refusal(400, message if message.endswith(".") else f"{message}.", param, code)


def _short(text: str) -> str:
    """Truncate the text to 300 characters, because it may quote client input."""
    return text if len(text) < 300 else f"{text[:297]}..."


def busy(message: str) -> Refusal:
    """Return a `Refusal` for a request that the client may retry soon."""
    return Refusal(429, message, code="queue_full", headers={"Retry-After": "1"})


def draining() -> Refusal:
    """Return a `Refusal` for a request that arrives while the server is shutting down."""
    return Refusal(503, "The server is shutting down; send the request to another one.", code="shutting_down")


def cancelled() -> Refusal:
    """Return a `Refusal` for a request that the engine cancelled before its output ended."""
    return Refusal(
        503,
        "The engine cancelled this request, because it is closing or has new weights; send the request again.",
        code="cancelled",
        headers={"Retry-After": "1"},
    )


def failed() -> Refusal:
    """Return a `Refusal` for a request whose output cannot continue. Only the log gives the reason."""
    return Refusal(500, "The engine failed during this request; send the request again.", code="engine_failed")
