"""The engine: one thread that owns the runner, and a queue for requests from all other threads."""

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Literal, Self

import jax

from jspec.acceptance import Rule
from jspec.core.transfers import explicit_transfers
from jspec.core.types import check_counts
from jspec.decoding.validate_arguments import check_rule
from jspec.drafters.base import DraftSource
from jspec.drafters.standalone.model import as_drafter
from jspec.engine import validate_options as arguments
from jspec.engine.background_compile import Compiler
from jspec.engine.heartbeat import Heartbeat
from jspec.engine.loop import Loop
from jspec.engine.memory_budget import check_memory, fit_length
from jspec.engine.request import Request, Result
from jspec.engine.run_all import run_all
from jspec.engine.runner import Runner
from jspec.engine.scheduler import ActiveRequest
from jspec.engine.slots import Sizes, Variant
from jspec.engine.validate_request import check_request
from jspec.engine.warmup import warm_up
from jspec.engine.weights import Running, Update
from jspec.models.kv_cache import whole_tiles
from jspec.models.llama import Llama

_MAX_TOP = 20  # maximum number of top log-probabilities per token, the same as on other servers


class Engine:
    """A continuous-batching engine: requests join and leave a batch that decodes as `jspec.speculative_generate` does.

    Args:
        target: the model whose distribution the output follows.
        draft: a draft model or a drafter; None for plain decoding. The engine uses the weights that both models have
            when it is created. If either model's weights change later, the engine rejects requests until `update` is
            called.
        slots: the number of requests to decode at once. Other requests wait.
        max_length: the maximum sequence length in tokens, including the prompt. Every slot reserves memory for it. The
            default is 1,024, or the models' number of positions if that is less. "auto" starts with up to 8,192 tokens,
            and halves the length until the slots take at most half of the free memory, but not below 1,024.
        num_draft_tokens: K, the number of draft tokens per round. "auto" chooses between 0, 1, 2, 4 and 8 during
            decoding, from the measured cost of rounds and the recent acceptance rate. A tree drafter drafts its whole
            tree or nothing.
        accept: the acceptance rule for requests without a key.
        max_waiting: the maximum number of waiting requests.
        chunks: prefill chunk sizes in tokens, each at most `max_length`. These sizes determine array shapes.
        read_tokens: the approximate number of prompt tokens to prefill between two calls while other requests decode.
        rounds: the maximum number of rounds in one call. New requests can start only between calls.
        call_seconds: the target duration of a call, in seconds. The engine chooses the number of rounds to match.
        journal: whether to record `device.commands`, including updated weights, to replay the engine's work.

    Attributes:
        sizes: the sizes of the slots and of the compiled programs.

    Raises:
        ValueError, TypeError: the arguments are invalid (see `jspec.speculative_generate`), or there is not enough
            memory for the slots.
    """

    def __init__(
        self,
        target: Llama,
        draft: DraftSource | None = None,
        *,
        slots: int = 8,
        max_length: int | Literal["auto"] | None = None,
        num_draft_tokens: int | Literal["auto"] = "auto",
        accept: str | Rule = "rejection",
        max_waiting: int = 64,
        chunks: tuple[int, ...] = (32, 256),
        read_tokens: int = 256,
        rounds: int = 16,
        call_seconds: float = 0.03,
        journal: bool = False,
    ):
        length = arguments.length(target, draft, max_length)
        counts = {"slots": slots, "max_length": length, "max_waiting": max_waiting, "read_tokens": read_tokens}
        check_counts(**counts, rounds=rounds, **{"the smallest of chunks": min(chunks, default=0)})
        drafter, rule, lengths = None if draft is None else as_drafter(draft), check_rule(accept), (0,)
        if drafter is not None:
            lengths = arguments.lengths(target, drafter, num_draft_tokens, rule)
            arguments.check_readable(drafter)
        chunks = tuple(sorted({min(size, whole_tiles(length)) for size in chunks}))
        num_top = min(_MAX_TOP, target.config.vocab_size)
        sizes = Sizes(slots, length, 8, chunks, lengths, rounds, num_top, arguments.small_batches(target, slots))
        self._num_draft_tokens, self._max_waiting = lengths[-1] or None, max_waiting
        with explicit_transfers():
            self._any_key = jax.random.split(jax.random.key(0, impl="threefry2x32"), 1)
        check_request(Request((0,), 1), self._any_key, target, drafter, self._num_draft_tokens, sizes)
        arguments.check_one_device((target, drafter))
        self.sizes = sizes = fit_length(target, drafter, sizes) if max_length == "auto" else sizes
        check_memory(target, drafter, sizes)
        self.device = Runner(target, drafter, rule, sizes, journal)
        self._loop = Loop(self.device, read_tokens, call_seconds)
        self._wake, self._closing, self._thread = threading.Condition(), False, None
        self._arrived: deque[ActiveRequest] = deque()
        self._heartbeat = Heartbeat()
        self._compiler = Compiler(self.device.deferred_compiles, self._wake_thread)  # for constrained requests

    def __enter__(self) -> Self:
        """Compile the programs (which takes a while), measure the cost of rounds, and start the engine's thread.

        Programs for constrained requests are compiled at the first such request, or by `expect_constraints`.
        """
        self.device.compile()
        warm_up(self.device, self._loop.round_budget)
        self._thread = threading.Thread(target=self._run, name="jspec engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(cancel=kind is not None)

    def close(self, cancel: bool = False) -> None:
        """Finish all submitted requests (or cancel them if `cancel` is true), and stop the engine."""
        with self._wake:
            self._closing = True
            self._loop.cancel_all |= cancel
            self._wake.notify()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            self._compiler.close()

    def expect_constraints(self) -> None:
        """Compile the programs for constrained requests in the background.

        Constrained requests wait in the queue until they can be decoded without drafts, or with one draft length.
        The persistent compilation cache does not store these programs, because they call back to the host. They are
        traced in a separate thread, which sees settings from `jax.config.update` but not from `with` statements.
        """
        with self._wake:
            if not self._closing and not (self._compiler.is_done and self.device.can_constrain):
                self._compiler.begin()

    def _wake_thread(self) -> None:
        with self._wake:
            self._wake.notify()

    def update(
        self, target: Llama | None = None, draft: DraftSource | None = None, running: Running = "finish"
    ) -> None:
        """Use new weights, without compiling anything. Block until they are in use.

        Requests that arrive during the update wait for it. If the target's weights change, the engine forgets all
        prefixes. If only the draft's weights change, running requests continue: under an exact rule, the output
        distribution does not depend on the draft.

        Args:
            target: a model that differs from the engine's only in its weights, which are not copied; None for the
                engine's own target, whose weights may have changed in place.
            draft: the same for the draft model or drafter.
            running: what happens to running requests if the target's weights change. "finish" first finishes them with
                the old weights. "restart" discards their output, counts this in `Result.restarts`, and starts them
                again. "abort" cancels them.

        Raises:
            ValueError: `running` is unknown, or a model differs in more than its weights.
            RuntimeError: weights were deleted, the engine is closed, another update is waiting, or a listener called
                this method. After any error, the engine keeps the old weights.
        """
        update = Update(target, None if draft is None else as_drafter(draft), running)
        self.device.models.replacement(update.target, update.drafter)  # raises errors at once
        if threading.current_thread() is self._thread:
            raise RuntimeError("A listener cannot call update(), which would wait for it; use another thread.")
        with self._wake:
            if self._closing:
                raise RuntimeError("The engine is closed; create a new one from the new weights.")
            if self._loop.update is not None:
                raise RuntimeError("Another update of this engine has not finished; wait until it returns.")
            self._loop.update = update
            self._wake.notify()
        try:
            while self._thread is None and not update.done.is_set():
                self._loop.turn()
            update.wait()
        except KeyboardInterrupt:
            self._loop.update = None  # nobody waits for the update any more
            raise

    def submit(self, request: Request, listen: Callable[[Result], None]) -> ActiveRequest:
        """Queue a request. The engine's thread calls `listen` whenever the result has grown.

        `listen` should return quickly, because all requests wait for it. If it raises, only this request is cancelled.

        Raises:
            queue.Full: too many requests are waiting.
            RuntimeError: the engine is not running, or the models' weights have changed or were deleted.
            ValueError, TypeError: the request is invalid and was not queued.
        """
        active = self._make_active(request, listen)
        self._queue(active)
        return active

    @property
    def target(self) -> Llama:
        """The target model, with the weights that are in use."""
        return self.device.target

    @property
    def num_waiting(self) -> int:
        """The number of requests without a slot."""
        return len(self._arrived) + self._loop.num_waiting

    @property
    def running_requests(self) -> list[ActiveRequest]:
        """The requests with a slot."""
        return self._loop.running_requests

    def trouble(self) -> str:
        """Return a sentence that says why requests make no progress, or "". Time spent compiling does not count."""
        if self._thread is not None and not self._thread.is_alive() and not self._closing:
            return "The engine's thread has ended."
        seconds = 0.0 if self.device.is_compiling else self._heartbeat.overdue
        return f"The engine has been in one call for {seconds:.0f} seconds." if seconds else ""

    def _queue(self, active: ActiveRequest) -> None:
        with self._wake:
            if self._closing or self._thread is None:
                raise RuntimeError("The engine is not running; use it as `with Engine(...) as engine:`.")
            if self.num_waiting >= self._max_waiting:
                raise queue.Full(f"{self._max_waiting} requests are waiting already; try again later.")
            if active.request.variant is Variant.CONSTRAINED:
                self.expect_constraints()
            self._arrived.append(active)
            self._wake.notify()

    def cancel(self, active: ActiveRequest) -> None:
        """Cancel a request. Its result keeps the tokens decoded so far."""
        with self._wake:
            active.cancelled = True
            self._wake.notify()

    def generate(self, requests: Iterable[Request]) -> list[Result]:
        """Decode all `requests` and return their results in the same order. Block until all are finished."""
        ended: queue.SimpleQueue[Result] = queue.SimpleQueue()

        def listen(result: Result) -> None:
            if result.finish_reason:
                ended.put(result)

        active_requests = [self._make_active(request, listen) for request in requests]
        run_all(active_requests, ended, self._queue, self.cancel)
        return [active.result for active in active_requests]

    async def stream(self, request: Request) -> AsyncIterator[Result]:
        """Yield the result, always the same object, whenever it has grown.

        Breaking out of the iterator cancels the request.
        """
        loop, grown = asyncio.get_running_loop(), asyncio.Event()

        def listen(_: Result) -> None:
            loop.call_soon_threadsafe(grown.set)

        active = self.submit(request, listen)
        try:
            while True:
                await grown.wait()
                grown.clear()
                last = active.result.finish_reason is not None
                yield active.result
                if last:
                    return
        finally:
            if active.result.finish_reason is None:
                self.cancel(active)

    def stream_sync(self, request: Request) -> Iterator[Result]:
        """Yield results like `stream`, on an engine that is not running. Decoding happens in the calling thread.

        The engine chooses between at most two draft lengths, unless all programs have been compiled.

        Raises:
            RuntimeError: the engine is running, or the models' weights have changed or were deleted.
            ValueError, TypeError: the request is invalid.
        """
        if self._thread is not None:
            raise RuntimeError("The engine is running in its own thread; use `engine.stream`, or no `with` statement.")
        self.device.is_lazy = not self.device.is_compiled
        self._loop.round_budget.exclude_time(math.inf)  # the time since the previous request
        return self._stream_sync(self._make_active(request, lambda _: None))

    here = stream_sync  # the older name

    def _stream_sync(self, active: ActiveRequest) -> Iterator[Result]:
        result, num_delivered = active.result, 0
        self._loop.submit(active)
        try:
            while True:
                while result.finish_reason is None and len(result.tokens) == num_delivered:
                    self._loop.turn()
                num_delivered, is_last = len(result.tokens), result.finish_reason is not None
                paused = time.perf_counter()
                yield result
                if is_last:
                    return
                self._loop.round_budget.exclude_time(time.perf_counter() - paused)
        finally:
            if result.finish_reason is None:
                active.cancelled = True
                self._loop.turn()

    @explicit_transfers()
    def _make_active(self, request: Request, listen: Callable[[Result], None]) -> ActiveRequest:
        if self._loop.update is None:
            self.device.check_weights()
        check_request(request, self._any_key, self.target, self.device.drafter, self._num_draft_tokens, self.sizes)
        return ActiveRequest(request, request.row(self.sizes.eos_ids, self.target.config.vocab_size), listen)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (ready := self._ready()) and not self._loop.is_busy and (self._arrived or not self._closing):
                    self._wake.wait()
                if self._closing and not (self._arrived or self._loop.is_busy):
                    return
                rejected = [active for active in ready if not self._can_decode(active)]
                error = f"The programs that constraints need cannot be compiled: {self._compiler.error}"
                for active in ready:
                    self._arrived.remove(active)
                    if active not in rejected:
                        self._loop.submit(active)
            for active in rejected:
                self._loop.fail(active, error)
            try:
                with self._heartbeat.beat():
                    self._loop.turn()
            except BaseException as worse:  # even an exception that ends threads must not end this one
                self._loop.recover(worse)

    def _ready(self) -> list[ActiveRequest]:
        """Return the arrived requests that need not wait for programs, or whose programs failed to compile."""
        return [active for active in self._arrived if self._can_decode(active) or self._compiler.is_done]

    def _can_decode(self, active: ActiveRequest) -> bool:
        """Return whether a request's programs are compiled, or the request no longer needs any."""
        has_ended = active.cancelled or self._loop.cancel_all
        return has_ended or active.request.variant < Variant.CONSTRAINED or self.device.can_constrain
