"""A server process: a port, an engine, and an end that loses nothing."""

import logging
import socket
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from sse_starlette.sse import AppStatus

if TYPE_CHECKING:  # it imports jax, and an address that is taken should be known before that
    from jspec.serve.app import Server

_PATIENCE = 30  # seconds, for answers that are complete to be taken


def bound(host: str, port: int) -> socket.socket:
    """Bind a socket to this address, which nobody else can have from then on.

    It does not listen yet: clients and load balancers should be refused while programs are compiled, not wait.

    Raises:
        ValueError: the host is empty, which would be every address of this machine.
        OSError: the address cannot be had.
    """
    if not host.strip():
        raise ValueError("The host is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for all of them.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        # With the option, connections of an earlier server that linger do not matter; where both sockets have it,
        # Linux lets a second server bind until one of them listens. So this one has it only while it binds.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        taken.close()
        raise
    return taken


class _Uvicorn(uvicorn.Server):
    """At the first signal new requests are refused, and the server ends when the others have; at the second, now."""

    def __init__(self, server: "Server"):
        # A log_config would close the handlers of the whole process.
        config = uvicorn.Config(server.app, loop="asyncio", lifespan="off", log_config=None, access_log=False,
                                timeout_graceful_shutdown=_PATIENCE)  # fmt: skip
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.should_exit or self._server.is_draining
        if self.should_exit:
            self.force_exit, self.config.timeout_graceful_shutdown = True, 0
            logging.getLogger("uvicorn.error").disabled = True  # it would tell of every answer that is cut short
        self._server.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._server.is_draining and not self._server.open:
            self.should_exit = True
        return await super().on_tick(counter)


def run(server: "Server", listener: socket.socket) -> None:
    """Serve until a signal says to end."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its connections should not hinder the next server
    # It would cut streams as soon as the engine is done with them, whether they have been read or not.
    AppStatus.disable_automatic_graceful_drain()
    _Uvicorn(server).run(sockets=[listener])
