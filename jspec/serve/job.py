"""One request body in the engine: its choices, and the tasks that wait for them."""

import asyncio
import contextlib
import functools
import logging
import queue
import time
from collections.abc import AsyncIterator, Callable

from anyio import CapacityLimiter, to_thread

from jspec.core.types import Json
from jspec.engine import Result
from jspec.engine.constraints import Constraint
from jspec.serve.choice import Choice
from jspec.serve.errors import Refusal, busy, cancelled, draining, failed, wrong
from jspec.serve.metrics import Metrics
from jspec.serve.parse_request import ParsedRequest, Served, parse_request
from jspec.serve.schemas import Body
from jspec.serve.usage import DraftUsage

_LOG = logging.getLogger("jspec")


class Job:
    """All choices of one request body. They advance whether or not a client reads them.

    Args:
        served: the model.
        metrics: the metrics in which to record the outcome.
        leave: called once, when all choices have ended.
        delivered: called once, when the client is no longer reading the response.
    """

    def __init__(self, served: Served, metrics: Metrics, leave: Callable[[], None], delivered: Callable[[], None]):
        self.served, self._metrics, self._leave, self._delivered = served, metrics, leave, delivered
        self.arrived, self.created = time.monotonic(), int(time.time())
        self.choices: list[Choice] = []
        self._loop, self._changed, self._closed = asyncio.get_running_loop(), asyncio.Event(), False

    async def begin(self, body: Body, constraint: Constraint | None, one_at_a_time: CapacityLimiter) -> None:
        """Parse the body and queue its requests. Both steps may take a while, so they run outside the event loop.

        Args:
            body: the request body.
            constraint: the compiled output constraint; None for any output.
            one_at_a_time: the limiter for worker threads.

        Raises:
            Refusal: the request is rejected, and none of its choices runs.
        """
        self.parsed: ParsedRequest = await to_thread.run_sync(
            parse_request, self.served, body, constraint, limiter=one_at_a_time
        )
        count = len(self.parsed.requests)
        self.choices = [Choice(self.served, self.parsed, i, self.arrived) for i in range(count)]
        try:
            await to_thread.run_sync(self._submit, limiter=one_at_a_time)
        except Refusal:
            for choice in self.choices:
                self._cancel(choice)
            self.choices = []
            raise
        for choice in self.choices:
            if choice.finish_reason is not None:  # the choice ended before its request was submitted
                self._cancel(choice)

    def _submit(self) -> None:
        try:
            for choice in self.choices:
                listen = functools.partial(self._listen, choice)
                choice.active_request = self.served.engine.submit(choice.request, listen)
                choice.result = choice.active_request.result  # some fields are known before the first token
        except queue.Full:
            raise busy("Too many requests are already waiting; try again later.") from None
        except RuntimeError:
            raise draining() from None
        except (ValueError, TypeError) as error:
            raise wrong(" ".join(str(error).split())) from None

    def _listen(self, choice: Choice, result: Result) -> None:
        """Pass a result from the engine's thread to the event loop."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so has every waiting task
            self._loop.call_soon_threadsafe(self._advance, choice, result)

    def _advance(self, choice: Choice, result: Result) -> None:
        before = choice.last
        try:
            new = choice.advance(result)
        except Exception:
            _LOG.exception("An output could not be converted to text; its request is cancelled.")
            choice.finish_reason, new = "error", 0
        if new:
            self._metrics.grown(choice, new, before)
        if choice.finish_reason is not None and result.finish_reason is None:
            self._cancel(choice)
        if all(choice.finish_reason is not None for choice in self.choices):
            self._end()
        self._changed.set()

    def _cancel(self, choice: Choice) -> None:
        if choice.active_request is not None and choice.active_request.result.finish_reason is None:
            self.served.engine.cancel(choice.active_request)

    def close(self) -> None:
        """Close the job after the engine has finished it or its client has disconnected."""
        if self._closed:
            return
        self._closed = True
        try:
            for choice in self.choices:
                choice.stop("abort")
                self._cancel(choice)
            if self.choices:
                self._metrics.finished(self.choices, self.parsed.body.n, self.draft_usage())
        finally:
            self._end()

    def delivered(self) -> None:
        """Record that the client has read the response or will never read it."""
        delivered, self._delivered = self._delivered, _nothing
        delivered()

    def _end(self) -> None:
        """Record that no choice is in progress. The client may still be reading the response."""
        leave, self._leave = self._leave, _nothing
        leave()

    async def news(self) -> AsyncIterator[None]:
        """Yield whenever there is new output, and at least once. Stop when all choices have ended.

        Raises:
            Refusal: a choice has failed.
        """
        while True:
            is_last = all(choice.finish_reason is not None for choice in self.choices)
            reasons = {choice.finish_reason for choice in self.choices}
            for choice in self.choices:
                if choice.finish_reason == "error":
                    raise _refusal(choice.result, self.parsed.body.constrained_by)
            if "abort" in reasons:
                raise cancelled()
            yield
            if is_last:
                return
            await self._changed.wait()
            self._changed.clear()

    async def done(self) -> None:
        """Wait until all choices have ended."""
        async for _ in self.news():
            pass

    def usage(self) -> dict[str, Json]:
        """Return the token counts that OpenAI clients expect, and the drafting statistics.

        Each prompt counts once, regardless of its number of choices.
        """
        prompts = [choice for choice in self.choices if choice.index % self.parsed.body.n == 0]
        read = sum(len(choice.request.tokens) for choice in prompts)
        written = sum(choice.count for choice in self.choices)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in prompts)},
            "jspec": self.draft_usage().as_json(self.served.num_draft_tokens),
        }

    def draft_usage(self) -> DraftUsage:
        """Return the drafting statistics of all choices."""
        return sum((choice.draft_usage() for choice in self.choices), DraftUsage())


def _refusal(result: Result, field: str) -> Refusal:
    """Return the `Refusal` for a failed result: a client error, a constraint's dead end, or any other failure."""
    if result.error_code in ("constraint_too_complex", "constraint_conflict"):
        return wrong(str(result.error), field, result.error_code)
    if result.error_code == "constraint_dead_end":
        return Refusal(500, str(result.error), field, result.error_code)
    return failed()


def _nothing() -> None:
    """Do nothing. This function replaces a callback that was already called."""
