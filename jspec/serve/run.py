"""The server process: its port, its engine and its graceful shutdown."""

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
from collections.abc import Collection, Generator
from types import FrameType
from typing import TYPE_CHECKING, cast

import uvicorn
from sse_starlette.sse import AppStatus

from jspec.serve.connections import Connection, Seldom, accept, most_connections

if TYPE_CHECKING:  # this module imports jax, which is slow; an address in use should be reported first
    from jspec.serve.app import Server

_LOG = logging.getLogger("jspec")
_DRAIN = 600  # seconds to decode accepted requests after a signal
_PATIENCE = 30  # seconds for clients to read complete responses
_SELDOM = Seldom()
_SOON = 10  # seconds for the rest of the shutdown


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to this address, so that no other process can bind it.

    The socket does not listen yet. While programs compile, connections from clients and load balancers are refused at
    once.

    Raises:
        ValueError: the host is empty, which would mean every address of this machine.
        OSError: the address is not available.
    """
    if not host.strip():
        raise ValueError("The host is empty; pass an address such as 127.0.0.1, or 0.0.0.0 for all addresses.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        # With this option, an earlier server's lingering connections do not matter. If both sockets have it, Linux
        # lets a second server bind until one of them listens. So this socket has the option only while it binds.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        taken.close()
        raise
    return taken


class _Uvicorn(uvicorn.Server):
    """A uvicorn server that drains on the first signal and exits immediately on the second.

    While draining, the server rejects new requests. It exits when all earlier requests have ended.
    """

    def __init__(self, server: "Server", keep_alive: int):
        # A log_config would close all log handlers in the process.
        config = uvicorn.Config(
            server.app,
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=keep_alive,
            timeout_graceful_shutdown=_PATIENCE,
        )
        super().__init__(config)
        self._server, self._has_signal = server, False
        self._limits: queue.SimpleQueue[float | None] = queue.SimpleQueue()  # a signal handler may use this type

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections here. Uvicorn would accept more than there are file descriptors, and log each failure."""
        await super().startup([])
        listener = (sockets or [])[0]
        listener.setblocking(False)
        most = most_connections()
        if most < self._server.room:
            _LOG.warning(
                "The limit on file descriptors allows %d connections, fewer than the %d requests that may run or "
                "wait; raise the limit (ulimit -n).",
                most,
                self._server.room,
            )
        connections = cast(Collection[Connection], self.server_state.connections)
        self._accepting = asyncio.create_task(accept(listener, self._connection, connections, most))

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and shut down."""
        self._accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._accepting
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. From then on, the process is certain to end, even if something is stuck."""
        self._has_signal = True
        self.should_exit = self.should_exit or self._server.is_draining
        if self.should_exit:
            self.force_exit, self.config.timeout_graceful_shutdown = True, 0
            logging.getLogger("uvicorn.error").disabled = True  # uvicorn would log every response that is cut short
        self._server.is_draining = True
        self._limits.put(_SOON if self.should_exit else _DRAIN + _PATIENCE + _SOON)

    async def on_tick(self, counter: int) -> bool:
        """Check ten times a second whether the server should end."""
        if self._accepting.done():
            self._accepting.result()  # raises the error that ended the task
        if self._server.is_draining and not self.should_exit:
            trouble = self._server.trouble()
            if trouble:
                _LOG.error("%s The remaining requests are abandoned.", trouble)
            self.should_exit = bool(trouble) or not self._server.open
        if self.should_exit and self._has_signal and not self.force_exit:
            self._limits.put(_PATIENCE + _SOON)
        return await super().on_tick(counter)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the shutdown is complete."""
        threading.Thread(target=_watch, args=(self._limits,), name="jspec end", daemon=True).start()
        try:
            super().run(sockets)
        finally:
            self._limits.put(None)


def _watch(limits: "queue.SimpleQueue[float | None]") -> None:
    """End the process with status 1 if the next limit does not arrive within the seconds that the last one allows.

    A limit of None ends the watch. The watch runs in a thread, because the event loop itself may be stuck.
    """
    limit: float | None = None
    with contextlib.suppress(queue.Empty):
        limit = limits.get()
        while limit is not None:
            limit = limits.get(timeout=limit)
        return
    os._exit(1)


@contextlib.contextmanager
def ends_within(seconds: float) -> Generator[None]:
    """End the process with status 1 if the block exceeds `seconds`, because a stuck thread cannot be joined."""
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(server: "Server", listener: socket.socket, keep_alive: int = 75) -> None:
    """Serve until a signal ends the server.

    Args:
        server: the server to run.
        listener: a listening socket.
        keep_alive: the number of seconds that a connection may be idle. Proxies and client pools keep connections open
            for 60 seconds, and the server should not close a connection that they are about to use.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections must not block the next server
    # Automatic draining would cut off streams when the engine finishes them, even if clients have not read them.
    AppStatus.disable_automatic_graceful_drain()
    logging.getLogger("uvicorn.error").addFilter(_SELDOM)
    _Uvicorn(server, keep_alive).run(sockets=[listener])
