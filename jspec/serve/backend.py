"""The interface between the server and its engine, which may be a `jspec.engine.Engine` or a set of replicas."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jspec.engine import Request, Result
from jspec.engine.slots import Sizes
from jspec.models.language_model import HasConfig


class SubmittedRequest(Protocol):
    """A request in progress.

    Attributes:
        result: the result so far.
        assigned_at: when the request got its first slot, by `time.monotonic`; None before that.
    """

    result: Result
    assigned_at: float | None

    @property
    def request(self) -> Request: ...

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and all new tokens so far."""
        ...


class Backend(Protocol):
    """An engine as the server uses it. The methods are those of `jspec.engine.Engine`."""

    @property
    def target(self) -> HasConfig: ...

    @property
    def sizes(self) -> Sizes: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def running_requests(self) -> Sequence[SubmittedRequest]: ...

    def submit(self, request: Request, listen: Callable[[Result], None]) -> SubmittedRequest: ...

    def cancel(self, active: Any) -> None: ...

    def trouble(self) -> str: ...

    def generate(self, requests: Iterable[Request]) -> list[Result]: ...

    def expect_constraints(self) -> None: ...
