"""An engine whose requests run on replicas. If a replica is lost, its requests continue on others."""

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import logging
import queue
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol

from jspec.cluster.serve.admission import Admission
from jspec.cluster.serve.messages import (
    ModelInfo,
    RequestMessage,
    ResultDelta,
    check_constraint,
    continuation_message,
)
from jspec.cluster.serve.replica import HEARTBEAT
from jspec.engine import Request, Result
from jspec.engine.scheduler import no_listener
from jspec.engine.slots import Sizes

_LOG = logging.getLogger("jspec")
_RESPONSE_TIMEOUT = 10 * HEARTBEAT  # seconds after which a replica that sends nothing counts as unresponsive
_AVOID_SECONDS = 30.0  # for which an unresponsive replica gets no requests
_MAX_LOSSES = 12  # losses since the last token, by `_weight`, that end a request
ONGOING_PER_SLOT = 2  # requests that a replica accepts per slot, so that the next one is queued when a slot is free
_LATE = 1.0  # seconds; if this event loop itself is so late, a replica's silence means nothing
_MAX_PAUSES = 10_000  # how many to remember
_STALL_SECONDS = 120.0  # seconds without a delta after which `trouble` reports a stall


class Replicas(Protocol):
    """A way to send requests to replicas."""

    def __call__(self, message: RequestMessage, /) -> AsyncGenerator[ResultDelta]:
        """Send a request to one of the replicas, and yield the deltas of its result.

        The generator raises an exception if the replica is lost. Closing it cancels the request.
        """
        ...


@dataclasses.dataclass(eq=False)
class ReplicatedRequest:
    """A request in progress.

    Attributes:
        request: the request.
        listen: the function to call whenever the result has grown.
        result: the result so far, from all replicas that have worked on the request.
        assigned_at: when the request got its first slot, by `time.monotonic`; None before that.
        replica: the id of the replica that works on the request, if it has sent anything.
        has_slot: whether the replica has a slot for the request.
        last_token_at: when the last token arrived, or when the request arrived, by `time.monotonic`.
        has_moved: whether the request has lost a replica since its last token.
    """

    request: Request
    listen: Callable[[Result], None]
    result: Result = dataclasses.field(default_factory=Result)
    assigned_at: float | None = None
    replica: str | None = None
    has_slot: bool = False
    last_token_at: float = dataclasses.field(default_factory=time.monotonic)
    has_moved: bool = False

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and all new tokens so far."""
        return (*self.request.tokens, *self.request.generated, *self.result.tokens)

    def add(self, delta: ResultDelta, sent_at: float) -> None:
        """Append a delta, and notify the listener. `sent_at` is when the request was sent to the replica."""
        if self.assigned_at is None and delta.waited is not None:
            self.assigned_at, self.result.cached = sent_at + delta.waited, delta.values["cached"]
        delta.apply_to(self.result)
        if delta.entries or self.result.finish_reason is not None:
            self.notify()

    def end(self, reason: str, error: str | None = None) -> None:
        """End the request here, unless it has ended."""
        if self.result.finish_reason is None:
            self.result.error = error
            self.result.finish_reason = reason
            self.notify()

    def notify(self) -> None:
        """Call `listen`, for the last time if the request has ended. If `listen` raises, the request is cancelled."""
        listen = self.listen
        if self.result.finish_reason is not None:
            self.listen = no_listener  # the listener may hold this request: a reference cycle
        try:
            listen(self.result)
        except Exception:
            _LOG.exception("The listener of a request has failed; the request is cancelled.")
            self.listen, self.result.finish_reason = no_listener, "cancelled"


class ReplicatedEngine:
    """A replacement for `jspec.engine.Engine` that sends requests to replicas. Create it inside a running event loop.

    If a replica dies or stops responding, its requests continue on another one after their last received token. A
    request with a key therefore gets the tokens of an uninterrupted run. Without a key, the remaining tokens are
    sampled given the earlier ones, so the whole output has the target's distribution.

    Args:
        replicas: sends a request to a replica.
        info: the replicas' model.
        count: the number of replicas.

    Attributes:
        target: a stand-in for the target, which has only its `config`.
        sizes: the sizes of a replica's engine, with the slots of all replicas.
        moved: the number of moves to another replica, by reason: "lost", "unresponsive" or "failed".
        pauses: the seconds without a token that the latest moves have caused.
    """

    def __init__(self, replicas: Replicas, info: ModelInfo, count: int):
        self.target = info
        self.sizes: Sizes = dataclasses.replace(info.sizes, slots=info.sizes.slots * count)
        self.moved, self.pauses = Counter[str](), deque[float](maxlen=_MAX_PAUSES)
        self._replicas, self._loop = replicas, asyncio.get_running_loop()
        self._tasks: dict[ReplicatedRequest, asyncio.Task[None]] = {}
        self._num_slots, self._seen = info.sizes.slots, dict[str, float]()  # when each live replica sent its last delta
        self._admission = Admission(self._capacity)
        self._unresponsive: dict[str, float] = {}  # replicas that stopped answering, and when
        self._last_delta_at = time.monotonic()
        self._alarm: asyncio.Future[None] = self._loop.create_future()  # done when a replica stops responding

    def submit(self, request: Request, listen: Callable[[Result], None]) -> ReplicatedRequest:
        """Send a request to a replica. `listen` is called in the event loop whenever the result has grown.

        Raises:
            TypeError: the constraint cannot be sent to another process.
        """
        check_constraint(request)
        active = ReplicatedRequest(request, listen)
        self._loop.call_soon_threadsafe(self._start, active)
        return active

    def _start(self, active: ReplicatedRequest) -> None:
        if not self._tasks:
            self._last_delta_at = time.monotonic()
        # Ray would give all choices of one HTTP request the same id, which it finds in the context.
        task = self._loop.create_task(self._decode(active), context=contextvars.Context())
        self._tasks[active] = task
        task.add_done_callback(functools.partial(self._end, active))

    def _end(self, active: ReplicatedRequest, task: asyncio.Task[None]) -> None:
        del self._tasks[active]
        if not task.cancelled() and (error := task.exception()):
            _LOG.error("A request ends with an error.", exc_info=error)
        active.end("error", "The server failed during this request.")

    def cancel(self, active: ReplicatedRequest) -> None:
        """Cancel a request. Its result keeps the tokens decoded so far."""
        self._loop.call_soon_threadsafe(self._cancel, active)

    def _cancel(self, active: ReplicatedRequest) -> None:
        if task := self._tasks.get(active):
            task.cancel()
        active.end("cancelled")

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Decode all `requests` and return their results in the same order. Call this outside the event loop."""
        ended = queue.SimpleQueue[Result]()
        active_requests = [
            self.submit(request, lambda result: ended.put(result) if result.finish_reason else None)
            for request in requests
        ]
        for _ in active_requests:
            ended.get()
        return [active.result for active in active_requests]

    def expect_constraints(self) -> None:
        """Do nothing: a replica compiles them at its first constrained request, or once it is idle after others."""

    @property
    def running_requests(self) -> list[ReplicatedRequest]:
        """The requests that have had a slot."""
        return [active for active in [*self._tasks] if active.assigned_at is not None]

    @property
    def num_waiting(self) -> int:
        """The number of requests that still wait for their first slot."""
        return sum(active.assigned_at is None for active in [*self._tasks])

    def trouble(self) -> str:
        """Return a sentence that says why requests make no progress, or ""."""
        seconds = time.monotonic() - self._last_delta_at if self._tasks else 0.0
        return f"No replica has answered for {seconds:.0f} seconds." if seconds > _STALL_SECONDS else ""

    async def _decode(self, active: ReplicatedRequest) -> None:
        """Decode a request, on one replica after another until it has ended."""
        failures, losses = 0, 0  # both since the last token
        while active.result.finish_reason is None:
            num_tokens, active.replica, active.has_slot = len(active.result.tokens), None, False
            try:
                async with self._admission.place(active.has_moved):
                    return await self._decode_on_one_replica(active)
            except (ValueError, TypeError) as error:  # the replica's engine rejects the request
                return active.end("error", str(error))
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled():
                    raise
                self._record_loss(active, error)
                has_grown = len(active.result.tokens) > num_tokens
                failures, losses = (0, 0) if has_grown else (failures + 1, losses + _weight(active, error))
                if losses >= _MAX_LOSSES:
                    active.end("error", f"Replicas failed {failures} times in a row on this request: {error}")
                elif reason := _finish_reason(active):
                    active.end(reason)
            await asyncio.sleep(min(1.0, 0.01 * 2**failures))

    async def _decode_on_one_replica(self, active: ReplicatedRequest) -> None:
        """Decode the rest of a request on one replica.

        Raises:
            TimeoutError: the replica stopped responding.
            ReplicaError: the replica's engine failed.
            ValueError, TypeError: the engine rejects the request.
            Exception: the connection to the replica was lost.
        """
        sent_at = time.monotonic()
        deltas = self._replicas(continuation_message(active.request, active.result, self._replicas_to_avoid()))
        try:
            while active.result.finish_reason is None:
                delta = await self._next(deltas, has_begun=active.replica is not None)
                self._record_delta(delta.replica)
                active.replica, active.has_slot = delta.replica, delta.waited is not None
                if delta.values["finish_reason"] in ("error", "cancelled") and delta.values["error_code"] is None:
                    raise ReplicaError(delta.values["error"] or "The replica's engine was closed.")
                if delta.entries.get("tokens"):
                    self._record_tokens(active)
                active.add(delta, sent_at)
            with contextlib.suppress(Exception):
                await self._next(deltas, has_begun=True)  # lets the replica end the call by itself
        finally:
            await deltas.aclose()

    async def _next(self, deltas: AsyncGenerator[ResultDelta], has_begun: bool) -> ResultDelta:
        """Return the next delta.

        Raises:
            TimeoutError: the replica stopped responding, or another one did before this request had a replica.
        """
        step, limit = asyncio.ensure_future(anext(deltas)), _RESPONSE_TIMEOUT if has_begun else None
        try:
            while True:
                due = self._loop.time() + (limit or 0)
                # A request without a replica may wait for the one that has stopped responding.
                others = [] if has_begun else [self._alarm]
                await asyncio.wait([step, *others], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if step.done():
                    return step.result()
                if limit is None or self._loop.time() < due + _LATE:
                    raise TimeoutError("The replica has stopped responding.")
        finally:
            if not step.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)

    def _record_delta(self, replica: str) -> None:
        self._last_delta_at = self._seen[replica] = time.monotonic()
        self._unresponsive.pop(replica, None)
        self._admission.admit()  # the replica may be new

    def _capacity(self) -> int:
        """Return how many requests to send: as many as the live replicas accept, and some for a replica that starts."""
        soon = time.monotonic() - 3 * HEARTBEAT
        self._seen = {replica: at for replica, at in self._seen.items() if at > soon}
        return (ONGOING_PER_SLOT * max(1, len(self._seen)) + 1) * self._num_slots

    def _record_tokens(self, active: ReplicatedRequest) -> None:
        now = time.monotonic()
        if active.has_moved:
            self.pauses.append(now - active.last_token_at)
        active.last_token_at, active.has_moved = now, False

    def _record_loss(self, active: ReplicatedRequest, error: BaseException) -> None:
        is_unresponsive = isinstance(error, TimeoutError)
        if is_unresponsive and active.replica is not None:
            if active.replica not in self._unresponsive:
                self._alarm.set_result(None)
                self._alarm = self._loop.create_future()
            self._unresponsive[active.replica] = time.monotonic()
        active.has_moved = True
        reason = "unresponsive" if is_unresponsive else "failed" if isinstance(error, ReplicaError) else "lost"
        self.moved[reason] += active.replica is not None
        _LOG.warning("A request moves to another replica: %s", " ".join(str(error).split())[:200] or type(error))

    def _replicas_to_avoid(self) -> frozenset[str]:
        """Return the replicas that stopped answering a short time ago."""
        now = time.monotonic()
        self._unresponsive = {name: at for name, at in self._unresponsive.items() if now < at + _AVOID_SECONDS}
        return frozenset(self._unresponsive)


class ReplicaError(Exception):
    """A failure of a replica's engine that the request did not cause."""


def _weight(active: ReplicatedRequest, error: BaseException) -> int:
    """Return how strongly a loss suggests that the request is its cause: 3 if it was decoded, 1 if it was waiting."""
    if active.has_slot or isinstance(error, ReplicaError | RuntimeError):
        return 3
    return 0 if active.replica is None else 1


def _is_cancelled() -> bool:
    """Return whether the current task is being cancelled. Ray may raise CancelledError for other reasons."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _finish_reason(active: ReplicatedRequest) -> str | None:
    """Return the finish reason of a request that lost its replica after its last token, or None if more are due."""
    request, tokens = active.request, active.result.tokens
    if tokens and tokens[-1] in request.eos_ids:
        return "eos"
    return "length" if len(request.generated) + len(tokens) >= request.max_new_tokens else None
