"""Compilation of request constraints in parallel with other work, and a limit on their number."""

import asyncio
import functools

from anyio import CapacityLimiter, to_thread

from jspec.engine.constraints import Constraint
from jspec.engine.grammar_pool import CompiledGrammar
from jspec.engine.grammars import Grammars
from jspec.serve.errors import Refusal, busy, wrong
from jspec.serve.output_grammar import Demand


class ConstraintCompiler:
    """A compiler for the demands of requests on their output.

    Each constraint needs its own processes, so the number of constraints at once is limited. Other requests wait.

    Args:
        grammars: the factory that compiles the constraints; None if this model's output cannot be constrained.
        limit: the maximum number of requests that hold a constraint. Three times as many requests may wait for one.
    """

    def __init__(self, grammars: Grammars | None, limit: int):
        self._grammars = grammars
        self._limiter, self._threads = CapacityLimiter(limit), CapacityLimiter(limit)
        self._held: dict[object, asyncio.Future[Constraint]] = {}

    async def compile(self, holder: object, demand: Demand) -> Constraint:
        """Compile the demand of `holder`. The caller must eventually `release` the holder.

        Raises:
            Refusal: too many requests are waiting for a constraint, or the server cannot enforce this demand.
        """
        grammars = self._grammars
        if grammars is None:
            raise wrong(f"{demand.field} is not supported with this model's tokenizer.", demand.field)
        if self._limiter.statistics().tasks_waiting >= 3 * self._limiter.total_tokens:
            raise busy(f"Too many requests with {demand.field} are already waiting; try again later.")
        await self._limiter.acquire_on_behalf_of(holder)
        compiled = asyncio.ensure_future(to_thread.run_sync(demand.compile, grammars, limiter=self._threads))
        self._held[holder] = compiled
        try:
            return await asyncio.shield(compiled)
        except ValueError as error:
            raise wrong(f"{demand.field} cannot be enforced: {error}", demand.field) from None
        except RuntimeError as error:
            raise Refusal(503, str(error), demand.field, "no_process", {"Retry-After": "1"}) from None

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
