"""Responses that are serialised and sent piece by piece. Clients must read each piece in time."""

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Protocol

from anyio import to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from jspec.core.types import Json
from jspec.serve.errors import Refusal, failed
from jspec.serve.job import Job

_LOG = logging.getLogger("jspec")
_PATIENCE = 600.0  # seconds that a client may take to read one piece
_LEVELS, _FEW = 4, 64  # nesting levels to split, because deeper values are small; list items per piece
_PIECE = 2**16  # characters
_PING = 15  # seconds between pings


class StreamedAnswer(Protocol):
    """A response in the format of one API, sent in chunks. A chunk's "type", if it has one, names its event."""

    @property
    def last_data(self) -> str:
        """The data of the last event, after all chunks; empty if there is no such event."""
        ...

    def chunks(self) -> AsyncIterator[Mapping[str, Json]]:
        """Yield new output whenever there is any.

        Raises:
            Refusal: the output cannot continue.
        """
        ...

    def failure(self, refusal: Refusal) -> Mapping[str, Json]:
        """Return the last chunk of an output that cannot continue."""
        ...


class JsonResponse(StreamingResponse):
    """One JSON object, which may be large."""

    def __init__(self, content: Mapping[str, Json]):
        super().__init__(_joined(dump_pieces(content)), media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_PATIENCE):
                await send(message)

        await super().__call__(scope, functools.partial(next_message, receive), send_in_time)


class JobResponse(JsonResponse):
    """A finished job's response as one object. The response counts as delivered afterwards, even if sending fails."""

    def __init__(self, job: Job, content: Mapping[str, Json]):
        self._job = job
        super().__init__(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.delivered()


class _Ping(ServerSentEvent):
    """A comment that keeps a connection alive while a request waits for its first token.

    A blank line follows the comment. Without it, clients that split a stream at blank lines would drop the first token
    together with the comment. No ping is sent between two tokens, because clients count the lines between them.
    """

    def __init__(self, is_needed: bool):
        super().__init__()
        self._line = b": ping\n\n" if is_needed else b""

    def encode(self) -> bytes:
        """Return the comment line, or nothing if no ping is needed."""
        return self._line


class Stream(EventSourceResponse):
    """A job's response as server-sent events. The job is closed afterwards, even if sending the events fails."""

    def __init__(self, job: Job, answer: StreamedAnswer):
        self._job, self._has_begun = job, False
        super().__init__(
            self._noted(_events(answer, job.parsed.echoes)),
            headers={"Cache-Control": "no-store, no-transform"},  # proxies that compress would hold events back
            sep="\n",
            send_timeout=_PATIENCE,
            ping=_PING,
            ping_message_factory=lambda: _Ping(not self._has_begun),
        )

    async def _noted(self, events: AsyncIterator[dict[str, str]]) -> AsyncIterator[dict[str, str]]:
        async for event in events:
            self._has_begun = True
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, functools.partial(next_message, receive), send)
        finally:
            self._job.close()
            self._job.delivered()


async def _events(answer: StreamedAnswer, is_large: bool) -> AsyncIterator[dict[str, str]]:
    """Yield an answer's chunks as events. Large chunks, which repeat a prompt, are serialised in a thread."""
    try:
        async for chunk in answer.chunks():
            yield _event(chunk, await to_thread.run_sync(_dump_large, chunk) if is_large else dump(chunk))
    except Refusal as refusal:
        chunk = answer.failure(refusal)
        yield _event(chunk, dump(chunk))
    except Exception:
        _LOG.exception("A stream failed.")
        chunk = answer.failure(failed())
        yield _event(chunk, dump(chunk))
    if answer.last_data:
        yield {"data": answer.last_data}


def _event(chunk: Mapping[str, Json], data: str) -> dict[str, str]:
    kind = chunk.get("type")
    return {"event": kind, "data": data} if isinstance(kind, str) else {"data": data}


async def next_message(receive: Receive) -> Message:
    """Return the client's next message.

    The call to `receive` is repeated every second. Otherwise, excess data from the client could pause reading, and the
    message that the client has disconnected would not arrive.
    """
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                return await receive()


def dump(value: Json) -> str:
    """Serialise `value` as JSON."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def dump_pieces(value: Json, levels: int = _LEVELS) -> Iterator[str]:
    """Yield the output of `dump` in many pieces, because no other thread runs while a piece is serialised."""
    if isinstance(value, dict) and levels:
        for i, (name, part) in enumerate(value.items()):
            yield f"{',' if i else '{'}{dump(name)}:"
            yield from dump_pieces(part, levels - 1)
        yield "}" if value else "{}"
    elif isinstance(value, list) and levels and len(value) <= _FEW:
        for i, part in enumerate(value):
            yield "," if i else "["
            yield from dump_pieces(part, levels - 1)
        yield "]" if value else "[]"
    elif isinstance(value, list):
        for i in range(0, len(value), _FEW):
            yield f"{',' if i else '['}{dump(value[i : i + _FEW])[1:-1]}"
        yield "]" if value else "[]"
    else:
        yield dump(value)


def _dump_large(value: Json) -> str:
    return "".join(dump_pieces(value))


def _joined(pieces: Iterable[str]) -> Iterator[str]:
    """Join `pieces` into larger ones, because each send has a cost."""
    held, size = list[str](), 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _PIECE:
            yield "".join(held)
            held, size = [], 0
    yield "".join(held)
