"""Compilation of output constraints in parallel with other work, and a limit on their number."""

import asyncio
import functools
from collections import OrderedDict

from anyio import CapacityLimiter, to_thread

from jspec.engine.constraints import Constraint
from jspec.engine.grammar_pool import CompiledGrammar
from jspec.engine.grammars import Grammars
from jspec.serve.errors import Refusal, busy, wrong
from jspec.serve.output_grammar import OutputConstraint

_MOST_KEPT = 8


class ConstraintCompiler:
    """A compiler of output constraints.

    Each constraint needs its own processes, so the number of constraints in use is limited, and other requests wait.
    A few compiled constraints of earlier requests are kept, because clients send the same tools or schemas repeatedly.

    Args:
        grammars: the factory that compiles the constraints; None if this model's output cannot be constrained.
        limit: the maximum number of requests that hold a constraint. Three times as many requests may wait for one.
    """

    def __init__(self, grammars: Grammars | None, limit: int):
        self._grammars = grammars
        self._limiter, self._threads = CapacityLimiter(limit), CapacityLimiter(limit)
        self._held: dict[object, tuple[str, asyncio.Future[Constraint]]] = {}
        self._kept = OrderedDict[str, CompiledGrammar]()  # from the oldest to the latest; none of them is in use

    async def compile(self, holder: object, constraint: OutputConstraint) -> Constraint:
        """Compile a constraint for `holder`. The caller must eventually `release` the holder.

        Raises:
            Refusal: too many requests are waiting for a constraint, or the server cannot enforce this constraint.
        """
        grammars = self._grammars
        if grammars is None:
            raise wrong(f"{constraint.field} is not supported with this model's tokenizer.", constraint.field)
        if self._limiter.statistics().tasks_waiting >= 3 * self._limiter.total_tokens:
            raise busy(f"Too many requests with {constraint.field} are already waiting; try again later.")
        await self._limiter.acquire_on_behalf_of(holder)
        compiled = asyncio.ensure_future(self._compiled(grammars, constraint))
        self._held[holder] = constraint.key, compiled
        try:
            return await asyncio.shield(compiled)
        except ValueError as error:
            raise wrong(f"{constraint.field} cannot be enforced: {error}", constraint.field) from None
        except RuntimeError as error:
            raise Refusal(503, str(error), constraint.field, "no_process", {"Retry-After": "1"}) from None

    async def _compiled(self, grammars: Grammars, constraint: OutputConstraint) -> Constraint:
        kept = self._kept.pop(constraint.key, None)
        if kept is not None and kept.is_ready:
            return kept
        if kept is not None:
            kept.close()
        try:
            return await to_thread.run_sync(constraint.compile, grammars, limiter=self._threads)
        except RuntimeError:  # too many processes may be running
            if not self._kept:
                raise
            self._forget(0)
            return await to_thread.run_sync(constraint.compile, grammars, limiter=self._threads)

    def release(self, holder: object) -> None:
        """Release the constraint that was compiled for `holder`, if any.

        A compilation that is still running counts towards the limit until it ends. Otherwise, clients that
        disconnect could start an unlimited number of processes.
        """
        if held := self._held.pop(holder, None):
            key, compiled = held
            compiled.add_done_callback(functools.partial(self._leave, holder, key))

    def _leave(self, holder: object, key: str, compiled: "asyncio.Future[Constraint]") -> None:
        self._limiter.release_on_behalf_of(holder)
        if compiled.cancelled() or compiled.exception() is not None:
            return
        if isinstance(constraint := compiled.result(), CompiledGrammar):
            self._keep(key, constraint)

    def _keep(self, key: str, grammar: CompiledGrammar) -> None:
        if older := self._kept.pop(key, None):
            older.close()
        self._kept[key] = grammar
        self._forget(_MOST_KEPT)

    def _forget(self, most: int) -> None:
        """Close the oldest kept constraints until there are at most `most`."""
        while len(self._kept) > most:
            self._kept.popitem(last=False)[1].close()

    def close(self) -> None:
        """End all processes."""
        if self._grammars is not None:
            self._grammars.close()
