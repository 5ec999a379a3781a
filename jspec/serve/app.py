"""The HTTP routes, and the lifecycle of a request."""

import asyncio
import contextlib
import logging
import reprlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TypeVar, cast

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from jspec.core.tokenizer import Tokenizer
from jspec.core.types import Json
from jspec.engine.constraints import Constraint
from jspec.engine.grammars import Grammars
from jspec.engine.heartbeat import Heartbeat
from jspec.models.language_model import HasConfig
from jspec.serve.access import Access, Guard, StripTrailingSlash
from jspec.serve.apis import APIS, Api
from jspec.serve.backend import Backend
from jspec.serve.constraint_jobs import ConstraintCompiler
from jspec.serve.conversions import CONVERSIONS, Conversion
from jspec.serve.errors import Refusal, busy, draining, wrong
from jspec.serve.fields import ModelBody
from jspec.serve.job import Job
from jspec.serve.metrics import Metrics
from jspec.serve.output_grammar import output_constraint
from jspec.serve.parse_request import Served, number_of_choices, parse_request
from jspec.serve.request_body import as_json, check_key, read
from jspec.serve.schemas import Body, CompletionBody
from jspec.serve.sse import JobResponse, JsonResponse, Stream, dump, next_message
from jspec.serve.token_text import Names
from jspec.serve.tools.detect import detect_tool_support
from jspec.serve.validation import validated
from jspec.text import eos_ids

_LOG = logging.getLogger("jspec")
_HERE = Access()
_T = TypeVar("_T")
AnyBody = TypeVar("AnyBody", bound=ModelBody)
_MORE_CONSTRAINTS = 4  # constraints beyond the number of slots, which compile while the others are in use
_UNREAD = 4  # limit on choices that are in progress or not yet fully read, as a multiple of `room`


class Server:
    """An application for `uvicorn`, or any other ASGI server, backed by a running engine.

    Args:
        engine: a running engine to which nothing else submits requests. Its queue has room for `max_waiting` plus
            `slots` requests.
        tokenizer: the target's tokenizer.
        name: the model name that clients use.
        version: the version that /version returns.
        max_waiting: the maximum number of waiting requests. A request for n choices counts n times.
        api_key: the key that clients must send. None means that no key is required.
        metrics_prefix: the prefix of metric names.
        max_body: the largest request body, in bytes.
        access: the hosts and web pages that may use the server without a key.

    Attributes:
        app: the application.
        metrics: the metrics that /metrics returns.
        room: the maximum number of choices that run or wait.
        is_draining: whether the server rejects new requests because it is shutting down.
        open: the number of choices that the engine has not finished.
        unread: the number of choices whose clients have not read the whole answer.
        checks: functions that each return a sentence that says what keeps requests from making progress, or an empty
            string if nothing does.
    """

    def __init__(
        self,
        engine: Backend,
        tokenizer: Tokenizer,
        name: str,
        *,
        version: str = "",
        max_waiting: int = 64,
        api_key: str | None = None,
        metrics_prefix: str = "jspec_",
        max_body: int = 4 * 2**20,
        access: Access = _HERE,
    ):
        target = engine.target
        has_template = getattr(tokenizer, "chat_template", None) is not None
        support = detect_tool_support(tokenizer) if has_template else None
        self._served = Served(name, engine, tokenizer, Names(tokenizer), grammars_for(target, tokenizer), support)
        self.metrics = Metrics(self._served, metrics_prefix)
        self._version, self._api_key, self._max_body = version, api_key, max_body
        self.room = engine.sizes.slots + max_waiting
        self._constraints = ConstraintCompiler(self._served.grammars, engine.sizes.slots + _MORE_CONSTRAINTS)
        self._one_at_a_time, self._two_at_a_time = CapacityLimiter(1), CapacityLimiter(2)
        self._conversions = CapacityLimiter(1)
        self.open, self.unread, self.is_draining = 0, 0, False
        self._reading = Heartbeat()  # measures how long requests take to be parsed and queued
        self.checks: list[Callable[[], str]] = [engine.trouble, self._reading_trouble]
        app = Starlette(routes=self._routes(), exception_handlers=_HANDLERS)
        app.router.redirect_slashes = False  # a redirect would go to the host name that the client sent
        self.app = StripTrailingSlash(Guard(app, access, api_key is not None))

    def warm_up(self) -> None:
        """Serve one request, so that the first client does not wait for programs that compile on first use.

        The programs for constrained requests are compiled while the server already answers other requests.
        """
        body = validated(CompletionBody, {"model": self._served.name, "prompt": [0], "max_tokens": 1, "seed": 0})
        self._served.engine.generate(parse_request(self._served, body).requests)
        if self._served.grammars is not None:
            self._served.engine.expect_constraints()

    @property
    def tools_note(self) -> str:
        """See `ToolSupport.note`."""
        return self._served.tool_support.note if self._served.tool_support else ""

    def trouble(self) -> str:
        """Return a sentence that says what keeps requests from making progress, or an empty string if nothing does."""
        return next(filter(None, (check() for check in self.checks)), "")

    def _reading_trouble(self) -> str:
        seconds = self._reading.overdue
        return f"No request has been read completely for {seconds:.0f} seconds." if seconds else ""

    def _routes(self) -> list[Route]:
        return [
            *(Route(path, self._answering(api), methods=["POST"]) for path, api in APIS.items()),
            *(Route(path, self._converting(one), methods=["POST"]) for path, one in CONVERSIONS.items()),
            Route("/v1/embeddings", _no_embeddings, methods=["GET", "POST"]),
            Route("/v1/responses/{name:path}", _no_response, methods=["GET", "POST", "DELETE"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._show_metrics),
            Route("/version", self._show_version),
            Route("/", self._page),
        ]

    async def _read(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        """Read and validate a request body."""
        check_key(request, self._api_key)
        content = await read(request, self._max_body)
        with self._reading.beat():  # the body may be large
            body = await to_thread.run_sync(_parsed, kind, content, limiter=self._two_at_a_time)
        if "model" in body.model_fields_set and body.model != self._served.name:
            raise _no_model(body.model, self._served.name)
        return body

    def _answering(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            given = await self._read(request, api.kind)
            with self._reading.beat():  # the body may be large
                body = await to_thread.run_sync(api.as_body, given, limiter=self._two_at_a_time)
            try:
                return await self._answer(request, api, given, body)
            except Refusal as refusal:
                raise api.renamed(refusal) from None

        return answer

    async def _answer(self, request: Request, api: Api, given: ModelBody, body: Body) -> Response:
        with contextlib.ExitStack() as ends:
            job = self._enter(body)
            ends.callback(job.delivered)
            ends.callback(job.close)
            constraint = await self._constraint(request, job, body)
            with self._reading.beat():
                await job.begin(body, constraint, self._one_at_a_time)
            answer = api.answer(job, given)
            if body.stream:
                ends.pop_all()  # the stream runs these callbacks when it ends
                return Stream(job, answer)
            await _unless_gone(request, job.done())
            whole = await to_thread.run_sync(answer.whole)  # an echo may be large
            job.close()
            ends.pop_all()  # `JobResponse` marks the answer as delivered once it is sent
            return JobResponse(job, whole)

    def _converting(self, conversion: Conversion) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            body = await self._read(request, conversion.kind)
            if self.is_draining:
                raise draining()
            if self._conversions.statistics().tasks_waiting >= self.room:
                raise busy("Too many texts are waiting to be converted; try again later.")
            work = to_thread.run_sync(conversion.convert, self._served, body, limiter=self._conversions)
            return JsonResponse(await _unless_gone(request, work))

        return answer

    async def _constraint(self, request: Request, job: Job, body: Body) -> Constraint | None:
        """Compile the body's output constraint. The job holds the constraint's processes until the job ends."""
        if not body.constrained_by:
            return None
        constraint = await to_thread.run_sync(output_constraint, self._served, body, limiter=self._two_at_a_time)
        return None if constraint is None else await _unless_gone(request, self._constraints.compile(job, constraint))

    def _enter(self, body: Body) -> Job:
        """Reserve capacity for the request's choices before doing any work on them, or reject the request."""
        count = number_of_choices(body)
        if self.is_draining:
            raise draining()
        if count > self.room:
            param = "n" if body.n > 1 else "prompt"
            sentence = (
                f"The request has {count} choices in total, and the server accepts at most {self.room}; "
                "request fewer choices."
            )
            raise wrong(sentence, param)
        if self.open + count > self.room:
            raise busy(f"{self.open} requests are already running or waiting; try again later.")
        if self.unread + count > _UNREAD * self.room:
            raise busy("Too many answers are waiting to be read by their clients; try again later.")
        self.open, self.unread = self.open + count, self.unread + count

        def left() -> None:
            self.open -= count
            self._constraints.release(job)

        def delivered() -> None:
            self.unread -= count

        job = Job(self._served, self.metrics, left, delivered)
        return job

    def close(self) -> None:
        """End the constraint processes. Constraints that are still running fail."""
        self._constraints.close()

    async def _models(self, request: Request) -> Response:
        check_key(request, self._api_key)
        return _json({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        check_key(request, self._api_key)
        if request.path_params["name"] != self._served.name:
            raise _no_model(request.path_params["name"], self._served.name)
        return _json(self._described())

    def _described(self) -> dict[str, Json]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": 0,
            "owned_by": "jspec",
            "max_model_len": self._served.max_length,
        }

    async def _health(self, request: Request) -> Response:
        if self.is_draining:
            raise draining()
        if trouble := self.trouble():
            raise Refusal(503, trouble, code="stuck")
        return _json({"status": "ok"})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _show_version(self, request: Request) -> Response:
        return _json({"version": self._version})

    async def _page(self, request: Request) -> Response:
        page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"Content-Security-Policy": "frame-ancestors 'none'"})


def grammars_for(target: HasConfig, tokenizer: Tokenizer) -> Grammars | None:
    """Return a factory of output constraints, or None if this tokenizer does not allow any."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    try:
        return Grammars(tokenizer, target.config.vocab_size, eos_ids(target, tokenizer))
    except ValueError as error:
        _LOG.warning("The output cannot be constrained: %s", error)
        return None


def _parsed(kind: type[AnyBody], body: bytes) -> AnyBody:
    return validated(kind, as_json(body))


async def _unless_gone(request: Request, work: Coroutine[object, object, _T]) -> _T:
    """Wait for `work` while the client stays connected.

    Raises:
        ClientDisconnect: the client disconnected before `work` was done.
    """

    async def gone() -> None:
        while (await next_message(request.receive))["type"] != "http.disconnect":
            pass

    waiting = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not waiting[0].done():
            raise ClientDisconnect
        return cast(_T, waiting[0].result())
    finally:
        for one in waiting:
            one.cancel()


async def _no_embeddings(request: Request) -> Response:
    raise Refusal(
        404, "This server has no embeddings, because it only generates text; send the request to an embedding server."
    )


async def _no_response(request: Request) -> Response:
    raise Refusal(404, "This server stores no responses; send the whole conversation to /v1/responses as input.")


def _no_model(name: str, served: str) -> Refusal:
    return Refusal(
        404,
        f"There is no model {reprlib.repr(name)} here; use {served!r}, the model of this server.",
        "model",
        "model_not_found",
    )


def _json(value: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, Refusal):
        return _json(error.as_json(), error.status, error.headers)
    if isinstance(error, HTTPException):  # Starlette raises this error if the path or method does not exist
        refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
        return _json(refusal.as_json(), error.status_code, error.headers)
    if isinstance(error, ClientDisconnect):
        return PlainTextResponse("", 400)  # the client has disconnected and does not read this response
    refusal = Refusal(500, "The server failed; see its log for the reason.", code="internal_error")
    return _json(refusal.as_json(), 500)


_HANDLERS = dict.fromkeys((Refusal, HTTPException, ClientDisconnect, Exception), _refuse)
