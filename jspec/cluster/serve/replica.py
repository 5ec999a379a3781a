"""A replica: one process with an engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from jspec.cluster.serve.messages import DeltaReader, ModelInfo, RequestMessage, ResultDelta
from jspec.engine import Engine, Result
from jspec.engine.grammar_pool import CompiledGrammar
from jspec.engine.grammars import Grammars

HEARTBEAT = 1.0  # the maximum number of seconds between two deltas; a longer silence means that the replica hangs


class Replica:
    """A Ray Serve deployment that decodes requests with its own engine.

    Args:
        make_engine: a function that loads the models. It returns an engine that is not running, and the factory of
            output constraints, if the model supports them.
        get_id: a function that returns the replica's id.
    """

    def __init__(self, make_engine: Callable[[], tuple[Engine, Grammars | None]], get_id: Callable[[], str]):
        self._engine, self._grammars = make_engine()
        self._engine.__enter__()
        self._has_decoded = False
        self._id = get_id()

    def info(self) -> ModelInfo:
        """Return the model's properties that the server needs."""
        return ModelInfo(self._engine.target.config, self._engine.sizes)

    async def decode(self, message: RequestMessage) -> AsyncIterator[ResultDelta]:
        """Decode a request. Yield a delta at once, whenever the result has grown, and at least once per `HEARTBEAT`.

        Raises:
            ValueError, TypeError: the engine rejects the request.
            RuntimeError: the engine is closed or stuck, or it cannot enforce the grammar.
        """
        request = await asyncio.to_thread(message.to_request, self._grammars)
        loop, grown = asyncio.get_running_loop(), asyncio.Event()

        def listen(_: Result) -> None:
            loop.call_soon_threadsafe(grown.set)

        active = self._engine.submit(request, listen)
        self._has_decoded = True
        deltas = DeltaReader(active, self._id)
        try:
            while (delta := deltas.next()).values["finish_reason"] is None:
                yield delta
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(grown.wait(), HEARTBEAT)
                grown.clear()
                self.check_health()  # if the engine is stuck, its requests need not wait for Ray to notice
            yield delta
        finally:
            if active.result.finish_reason is None:
                self._engine.cancel(active)
            if isinstance(request.constraint, CompiledGrammar):
                request.constraint.close()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine makes no progress. Ray Serve then replaces the replica.

        Once the replica is idle after its first requests, also start to compile the programs for constrained requests.
        Compilation at its start would slow down requests that have moved from a lost replica.
        """
        if trouble := self._engine.trouble():
            raise RuntimeError(trouble)
        is_idle = not self._engine.running_requests and not self._engine.num_waiting
        if self._has_decoded and is_idle and self._grammars is not None:
            self._has_decoded = False
            self._engine.expect_constraints()
