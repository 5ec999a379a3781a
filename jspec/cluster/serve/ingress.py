"""The HTTP server in front of the replicas. It keeps the tokens of every open stream."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from starlette.types import ASGIApp

from jspec.cluster.serve.messages import ModelInfo, RequestMessage, ResultDelta
from jspec.cluster.serve.replica_metrics import ReplicaMetrics
from jspec.cluster.serve.replicated_engine import ReplicatedEngine
from jspec.core.tokenizer import Tokenizer
from jspec.serve.app import Server


class Ingress:
    """A Ray Serve deployment that answers HTTP requests.

    Args:
        replicas: the handle of the deployment of replicas.
        make_tokenizer: a function that loads the target's tokenizer.
        name: the model name that clients use.
        count: the largest number of replicas.
        server_options: the options of `jspec.serve.app.Server`.
    """

    def __init__(
        self,
        replicas: Any,
        make_tokenizer: Callable[[], Tokenizer],
        name: str,
        count: int,
        server_options: Mapping[str, Any],
    ):
        self._replicas, self._make_tokenizer, self._name, self._count = replicas, make_tokenizer, name, count
        self._server_options = server_options

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application after the first replica is ready."""
        info: ModelInfo = await self._replicas.info.remote()
        engine = ReplicatedEngine(self._send, info, self._count)
        tokenizer = await asyncio.to_thread(self._make_tokenizer)
        server = Server(engine, tokenizer, self._name, **self._server_options)
        server.metrics.register(ReplicaMetrics(engine, self._name, server.metrics.prefix))
        await asyncio.to_thread(server.warm_up)
        self._server = server
        return server.app

    async def _send(self, message: RequestMessage) -> AsyncGenerator[ResultDelta]:
        response, is_complete = self._replicas.options(stream=True).decode.remote(message), False
        try:
            async for delta in response:
                yield delta
            is_complete = True
        finally:
            if not is_complete:
                response.cancel()

    async def drain(self, seconds: float) -> None:
        """Reject new requests, and wait until all others have ended and their answers have been read."""
        self._server.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._server.open or self._server.unread:
                    await asyncio.sleep(0.05)
