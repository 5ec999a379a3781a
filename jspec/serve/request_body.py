"""The raw request: its API key, its size and its JSON."""

import asyncio
import hmac
import json
import math
import zlib
from typing import NoReturn

from starlette.requests import Request

from jspec.core.types import Json
from jspec.serve.errors import Refusal, wrong

_PATIENCE = 60.0  # seconds that a body may take to arrive
_MOST_FIELDS, _MOST_COMMAS = 200_000, 500_000
_MOST_LEVELS = 900  # below Python's limit on recursion, so that a response can repeat what was parsed


def check_key(request: Request, key: str | None) -> None:
    """Compare the request's key with the server's in constant time.

    Raises:
        Refusal: the server has a key, and the request does not send it.
    """
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), key.encode())
    if not same or scheme.lower() != "bearer":
        raise Refusal(
            401,
            "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def read(request: Request, most: int) -> bytes:
    """Read and return the request body, which may have at most `most` bytes.

    A compressed body is decompressed, and the limit also applies to the result.

    Raises:
        Refusal: the body has more bytes, takes too long to arrive, or has an unknown encoding.
    """
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > most:
        raise _too_long(most)
    decompressor, body, received = _decompressor(request), bytearray(), 0
    try:
        async with asyncio.timeout(_PATIENCE):
            async for piece in request.stream():
                received += len(piece)
                body += piece if decompressor is None else decompressor.decompress(piece, most + 1 - len(body))
                if max(len(body), received) > most:
                    raise _too_long(most)
    except TimeoutError:
        raise Refusal(408, f"The body did not arrive within {_PATIENCE:g} seconds; send the request again.") from None
    if decompressor is not None:
        decompressor.check_end()
    return bytes(body)


class _Decompressor:
    """A decompressor of one gzip file that arrives in pieces."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)  # expects the header of gzip

    def decompress(self, piece: bytes, most: int) -> bytes:
        """Decompress the next piece, up to `most` bytes.

        Raises:
            Refusal: the data is damaged, or is followed by more data.
        """
        if piece and self._zlib.eof:
            raise wrong("The body has data after the end of its gzip data; send one gzip file.")
        try:
            decompressed = self._zlib.decompress(piece, most)
        except zlib.error:
            raise wrong(
                "The Content-Encoding is gzip, but the body is not valid gzip data; send valid gzip data."
            ) from None
        if self._zlib.unused_data:
            raise wrong("The body has data after the end of its gzip data; send one gzip file.")
        return decompressed

    def check_end(self) -> None:
        """Check that the data is complete.

        Raises:
            Refusal: the data ends too early.
        """
        if not self._zlib.eof:
            raise wrong("The body's gzip data ends too early; send all of it.")


def _decompressor(request: Request) -> _Decompressor | None:
    """Return a decompressor for a compressed body, or None.

    Raises:
        Refusal: the body's encoding is not supported.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise Refusal(
            415, f"The content encoding {encoding[:40]!r} is not supported; use gzip, or do not compress the body."
        )
    return _Decompressor() if encoding == "gzip" else None


def as_json(body: bytes) -> Json:
    """Return the JSON value of the body.

    Raises:
        Refusal: the body is not JSON.
    """
    _check_size(body)
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number, parse_float=_finite)
        if body.count(b"[") + body.count(b"{") > _MOST_LEVELS:  # long lists of numbers need no check
            _check_levels(value)
        if b"\\u" in body:  # an escape may be a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise wrong(f"The body is not UTF-8 text (byte {error.start + 1}).") from None
    except UnicodeEncodeError as error:
        raise wrong(
            f"The body contains {error.object[error.start]!r}, which is half a surrogate pair; send both halves."
        ) from None
    except RecursionError:
        raise wrong("The body is nested too deeply.") from None
    except ValueError as error:
        raise wrong(f"The body is not valid JSON: {error}.") from None


def _check_size(body: bytes) -> None:
    """Reject too many small values. Python holds its lock while it parses them, so all other requests would wait."""
    for marks, most, names in ((b"[{:", _MOST_FIELDS, "characters [, { and :"), (b",", _MOST_COMMAS, "commas")):
        if sum(body.count(mark) for mark in marks) > most:
            raise wrong(f"The body has more than {most} {names}; send a smaller body.", code="body_too_long")


def _check_levels(value: Json) -> None:
    """Reject a value with too many levels."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise wrong("The body is nested too deeply.")


def _too_long(most: int) -> Refusal:
    return Refusal(413, f"The body has more than {most} bytes; send a smaller body.", code="body_too_long")


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    """Return a number. Without this check, a number such as 1e999 would be infinite, which JSON cannot represent."""
    value = float(text)
    if math.isinf(value):
        raise wrong(f"The body contains the number {text[:40]}, which 64 bits cannot represent; send another number.")
    return value
