"""A body on its way through the engine: its choices, and who waits for them."""

import asyncio
import contextlib
import functools
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from anyio import CapacityLimiter, to_thread

from jspec.engine import Result
from jspec.engine.constraints import Constraint
from jspec.serve.choice import Choice
from jspec.serve.errors import Refusal, busy, draining, failed, wrong
from jspec.serve.metrics import Metrics
from jspec.serve.parse_request import Asked, Served, understand
from jspec.serve.schemas import Body
from jspec.serve.usage import Figures

_LOG = logging.getLogger("jspec")


class Job:
    """All choices of one body. They advance by themselves, whether anybody reads them or not.

    Args:
        served: the model.
        metrics: are told what comes of it.
        leave: is called once, when all choices have ended.
        delivered: is called once, when nobody reads its answer any more.
    """

    def __init__(self, served: Served, metrics: Metrics, leave: Callable[[], None], delivered: Callable[[], None]):
        self.served, self._metrics, self._leave, self._delivered = served, metrics, leave, delivered
        self.arrived, self.created = time.monotonic(), int(time.time())
        self.choices: list[Choice] = []
        self._loop, self._changed, self._closed = asyncio.get_running_loop(), asyncio.Event(), False

    async def begin(self, body: Body, constraint: Constraint | None, one_at_a_time: CapacityLimiter) -> None:
        """Understand the body and queue its requests; both may take a while, so not in the loop of events.

        Args:
            body: the request.
            constraint: its response format, compiled.
            one_at_a_time: limits the threads.

        Raises:
            Refusal: nothing runs.
        """
        self.asked: Asked = await to_thread.run_sync(understand, self.served, body, constraint,
                                                   limiter=one_at_a_time)  # fmt: skip
        count = len(self.asked.requests)
        self.choices = [Choice(self.served, self.asked, i, self.arrived) for i in range(count)]
        try:
            await to_thread.run_sync(self._submit, limiter=one_at_a_time)
        except Refusal:
            for choice in self.choices:
                self._cancel(choice)
            self.choices = []
            raise
        for choice in self.choices:
            if choice.finish_reason is not None:  # before its tenant was known
                self._cancel(choice)

    def _submit(self) -> None:
        try:
            for choice in self.choices:
                choice.tenant = self.served.engine.submit(choice.request, functools.partial(self._listen, choice))
                choice.result = choice.tenant.result  # with what is known of it before its first token
        except queue.Full:
            raise busy("Too many requests are waiting already; try again later.") from None
        except RuntimeError:
            raise draining() from None
        except (ValueError, TypeError) as error:
            raise wrong(" ".join(str(error).split())) from None

    def _listen(self, choice: Choice, result: Result) -> None:
        """In the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever would be told
            self._loop.call_soon_threadsafe(self._advance, choice, result)

    def _advance(self, choice: Choice, result: Result) -> None:
        before = choice.last
        try:
            new = choice.advance(result)
        except Exception:
            _LOG.exception("A text cannot be written down; its request is cancelled.")
            choice.finish_reason, new = "error", 0
        if new:
            self._metrics.grown(choice, new, before)
        if choice.finish_reason is not None and result.finish_reason is None:
            self._cancel(choice)
        if all(choice.finish_reason is not None for choice in self.choices):
            self._end()
        self._changed.set()

    def _cancel(self, choice: Choice) -> None:
        if choice.tenant is not None and choice.tenant.result.finish_reason is None:
            self.served.engine.cancel(choice.tenant)

    def close(self) -> None:
        """The engine has nothing more to do for it, or nobody wants it any more."""
        if self._closed:
            return
        self._closed = True
        try:
            for choice in self.choices:
                choice.stop("abort")
                self._cancel(choice)
            if self.choices:
                self._metrics.finished(self.choices, self.asked.body.n, self.figures())
        finally:
            self._end()

    def delivered(self) -> None:
        """Its answer has been read, or nobody will."""
        delivered, self._delivered = self._delivered, _nothing
        delivered()

    def _end(self) -> None:
        """Nothing of it is under way any more, though it may still be read."""
        leave, self._leave = self._leave, _nothing
        leave()

    async def news(self) -> AsyncIterator[None]:
        """Whenever there is more, and at least once; ends when all choices have.

        Raises:
            Refusal: a choice has failed.
        """
        while True:
            is_last = all(choice.finish_reason is not None for choice in self.choices)
            reasons = {choice.finish_reason for choice in self.choices}
            for choice in self.choices:
                if choice.finish_reason == "error":
                    raise _refusal(choice.result)
            if "abort" in reasons:
                raise draining()
            yield
            if is_last:
                return
            await self._changed.wait()
            self._changed.clear()

    async def done(self) -> None:
        """Wait for all choices."""
        async for _ in self.news():
            pass

    def usage(self) -> dict[str, Any]:
        """What OpenAI's clients count, and how it was drafted; a prompt counts once, however many choices it has."""
        prompts = [choice for choice in self.choices if choice.index % self.asked.body.n == 0]
        read = sum(len(choice.request.tokens) for choice in prompts)
        written = sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in prompts)},
            "jspec": self.figures().as_json(self.served.num_draft_tokens),
        }

    def figures(self) -> Figures:
        """How well it was drafted."""
        return sum((choice.figures() for choice in self.choices), Figures())


def _refusal(result: Result) -> Refusal:
    """Explain a failure: what is the client's fault, and what the constraint met without anybody's."""
    if result.error_code in ("constraint_too_complex", "constraint_conflict"):
        return wrong(str(result.error), "response_format", result.error_code)
    if result.error_code == "constraint_dead_end":
        return Refusal(500, str(result.error), "response_format", result.error_code)
    return failed()


def _nothing() -> None:
    """In the place of what was called."""
