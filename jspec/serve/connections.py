# pyright: reportUnnecessaryComparison=false
"""Limits on the number of connections and on how long each may keep the server waiting. The slowest are closed."""

import asyncio
import errno
import heapq
import logging
import os
import socket
import time
from collections.abc import Callable, Collection

import h11
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from jspec.serve.errors import wrong

_HEAD = 30.0  # seconds that a request head may take to arrive in full, from its first byte
_FLUSH = 60.0  # seconds that the client may take to read the last response once a connection closes
_TAKE = 600.0  # seconds that the client may take to read a part of a response
_MOST = 4096
_NEW = 1.0  # seconds that a new connection may take to send its request
_LOG = logging.getLogger(__name__)


class Seldom(logging.Filter):
    """A log filter that passes each warning at most once a minute, because clients can cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        now, message = time.monotonic(), str(record.msg)
        if record.levelno > logging.WARNING or now - self._last.get(message, -60.0) >= 60:
            self._last[message] = now
            return True
        return False


_LOG.addFilter(Seldom())


class Connection(H11Protocol):
    """A connection that closes if its client is idle for too long or sends a request head too slowly."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for the first request."""
        super().connection_made(transport)
        self.waits_since, self._head_began, self._limit = time.monotonic(), False, None
        self._unread: asyncio.TimerHandle | None = None
        self._end_after(self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes of a request."""
        before = self.cycle
        if self._is_idle and not self._head_began:
            self._head_began = True
            self._end_after(_HEAD)
        super().data_received(data)
        if self.cycle is not before:
            self._has_begun()

    def on_response_complete(self) -> None:
        """Wait for the next request, or continue with a request that arrived early."""
        before = self.cycle
        super().on_response_complete()
        self.waits_since = time.monotonic()
        self._head_began = False
        self._end_after(self.timeout_keep_alive)
        if self.cycle is not before:
            self._has_begun()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of the connection."""
        self._end_after(None)
        self._has_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the timeout for a client that is not reading."""
        super().pause_writing()
        self.waits_since = time.monotonic()
        self._unread = self.loop.call_later(_TAKE, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timeout, because the client is reading again."""
        self._has_read()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP with an error in the same format as all other errors."""
        answer = JSONResponse(wrong("The request is not valid HTTP/1.1.").as_json(), 400, {"Connection": "close"})
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # otherwise another response is in progress
            head = h11.Response(status_code=400, headers=answer.raw_headers)
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing, because the request is answered without the upgrade."""

    @property
    def is_waiting(self) -> bool:
        """Whether the server is waiting for the client to send a request, send the rest of one, or read a response."""
        owes = self._is_idle or self.cycle.more_body or self._unread is not None
        return owes and not self.transport.is_closing()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _has_begun(self) -> None:
        """Record that the request head is complete. The application limits the time for the body."""
        if not self._is_idle:
            self.waits_since = time.monotonic()
            self._end_after(None)

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _end_after(self, seconds: float | None) -> None:
        if self._limit is not None:
            self._limit.cancel()
        self._limit = None if seconds is None else self.loop.call_later(seconds, self._end)

    def _end(self) -> None:
        self.transport.close()
        self._limit = self.loop.call_later(_FLUSH, self.transport.abort)


async def accept(
    listener: socket.socket, make: Callable[[], Connection], connections: Collection[Connection], most: int
) -> None:
    """Accept connections indefinitely, and keep at most `most` of them open.

    If another connection arrives, the connections that have kept the server waiting longest are closed. If no client
    keeps the server waiting, further connections wait in the operating system's queue.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            client, _ = await loop.sock_accept(listener)
        except OSError as error:
            _LOG.warning("A connection cannot be accepted: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE):  # something else has more files open than usual
                _make_room(connections)
            await asyncio.sleep(0.1)
            continue
        try:
            _, newest = await loop.connect_accepted_socket(make, client)
        except OSError as error:  # the client has already disconnected
            _LOG.debug("A connection was lost: %s", error)
            client.close()
            continue
        while len(connections) > most:
            await asyncio.sleep(0 if _make_room(connections, newest) else 0.05)


def _make_room(connections: Collection[Connection], newest: Connection | None = None) -> bool:
    """Close the connections that have kept the server waiting longest. Each search is slow, so close several."""
    waiting = (connection for connection in connections if connection.is_waiting and connection is not newest)
    oldest = heapq.nsmallest(max(1, len(connections) // 16), waiting, key=lambda connection: connection.waits_since)
    if not oldest and newest is not None and newest.is_waiting and time.monotonic() - newest.waits_since > _NEW:
        oldest = [newest]
    if oldest:
        _LOG.warning(
            "There are %d connections, which is too many; closing those that have waited longest.", len(connections)
        )
    else:
        _LOG.warning("There are %d connections, all with running requests; further connections wait.", len(connections))
    for connection in oldest:
        connection.transport.abort()
    return bool(oldest)


def most_connections() -> int:
    """Return the maximum number of connections that leaves enough file descriptors for everything else."""
    try:
        import resource
    except ImportError:  # Windows, where sockets are not files
        return _MOST
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _MOST
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 64
    return max(1, min(_MOST, (limit - used) * 3 // 4))
