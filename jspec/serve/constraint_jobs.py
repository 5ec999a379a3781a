"""Compilation of request constraints in parallel with other work, and a limit on their number."""

import asyncio
import functools
from collections.abc import Callable

from anyio import CapacityLimiter, to_thread

from jspec.engine.constraints import Constraint
from jspec.engine.grammar_pool import CompiledGrammar
from jspec.engine.grammars import Grammars
from jspec.serve.errors import Refusal, busy, wrong
from jspec.serve.schemas import ResponseFormat


class ConstraintCompiler:
    """A compiler for response formats.

    Each format needs its own processes, so the number of formats that exist at once is limited. Other requests wait.

    Args:
        grammars: the factory that compiles the formats; None if this model's output cannot be constrained.
        limit: the maximum number of requests that hold a constraint. Three times as many requests may wait for one.
    """

    def __init__(self, grammars: Grammars | None, limit: int):
        self._grammars = grammars
        self._limiter, self._threads = CapacityLimiter(limit), CapacityLimiter(limit)
        self._held: dict[object, asyncio.Future[Constraint]] = {}

    async def compile(self, holder: object, wanted: ResponseFormat) -> Constraint:
        """Compile the format that `holder` requests. The caller must eventually `release` the holder.

        Raises:
            Refusal: too many requests are waiting for a constraint, or the server cannot enforce this format.
        """
        grammars = self._grammars
        if grammars is None:
            raise wrong("response_format is not supported with this model's tokenizer.", "response_format")
        if self._limiter.statistics().tasks_waiting >= 3 * self._limiter.total_tokens:
            raise busy("Too many requests with a response_format are already waiting; try again later.")
        await self._limiter.acquire_on_behalf_of(holder)
        compiled = asyncio.ensure_future(to_thread.run_sync(_compiling(grammars, wanted), limiter=self._threads))
        self._held[holder] = compiled
        try:
            return await asyncio.shield(compiled)
        except ValueError as error:
            raise wrong(f"response_format cannot be enforced: {error}", "response_format") from None
        except RuntimeError as error:
            raise Refusal(503, str(error), "response_format", "no_process", {"Retry-After": "1"}) from None

    def release(self, holder: object) -> None:
        """Release the constraint that was compiled for `holder`, if any.

        A compilation that is still running keeps its place until it ends. Otherwise, clients that disconnect could
        start an unlimited number of processes.
        """
        if compiled := self._held.pop(holder, None):
            compiled.add_done_callback(functools.partial(self._leave, holder))

    def _leave(self, holder: object, compiled: "asyncio.Future[Constraint]") -> None:
        self._limiter.release_on_behalf_of(holder)
        if compiled.cancelled() or compiled.exception() is not None:
            return
        if isinstance(constraint := compiled.result(), CompiledGrammar):
            constraint.close()

    def close(self) -> None:
        """End all processes."""
        if self._grammars is not None:
            self._grammars.close()


def _compiling(grammars: Grammars, wanted: ResponseFormat) -> Callable[[], Constraint]:
    if (regex := wanted.regex) is not None:
        return lambda: grammars.regex(regex)
    schema = wanted.json_schema.held if wanted.json_schema else {"type": "object"}
    return lambda: grammars.json_schema(schema)
