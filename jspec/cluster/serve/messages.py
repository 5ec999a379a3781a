"""Requests and results as messages between processes."""

import dataclasses
import time
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from convert.config import LlamaConfig
from jspec.engine import Request, Result
from jspec.engine.grammar_pool import CompiledGrammar
from jspec.engine.grammars import Grammars
from jspec.engine.scheduler import ActiveRequest
from jspec.engine.slots import Sizes

_KEYS = "threefry2x32"
# The tokens are last, so that another thread that sees new tokens also finds the rest.
PER_TOKEN = "origins", "logprobs", "raw_logprobs", "top_logprobs", "tokens"
_LISTS = "prompt_logprobs", "prompt_top_logprobs", "accepted", "judged", "drafted", *PER_TOKEN


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """The model's properties that the server needs.

    Attributes:
        config: the target's configuration.
        sizes: the sizes of one replica's engine.
    """

    config: LlamaConfig
    sizes: Sizes


class RequestMessage(NamedTuple):
    """A request on its way to a replica.

    Attributes:
        request: the request without its key and its constraint.
        key: the data of its key, ``uint32[2]``.
        grammar: the kind and the text of the grammar that constrains its output.
        avoid: the ids of replicas that have stopped answering and should not get the request.
    """

    request: Request
    key: np.ndarray | None
    grammar: tuple[str, str] | None
    avoid: frozenset[str] = frozenset()

    @property
    def text(self) -> tuple[int, ...]:
        """All tokens to prefill."""
        return (*self.request.tokens, *self.request.generated)

    def to_request(self, grammars: Grammars | None) -> Request:
        """Return the request with its key and its constraint. This may take a while, because a grammar is compiled.

        Raises:
            RuntimeError: the replica cannot enforce the grammar.
        """
        if self.grammar is not None and grammars is None:
            raise RuntimeError("This replica cannot constrain outputs; its log says why.")
        key = None if self.key is None else cast(Array, jax.random.wrap_key_data(jnp.asarray(self.key), impl=_KEYS))
        constraint = None if self.grammar is None or grammars is None else grammars.compile(*self.grammar)
        return dataclasses.replace(self.request, key=key, constraint=constraint)


def check_constraint(request: Request) -> None:
    """Check that a request can be sent to a replica.

    Raises:
        TypeError: the constraint was not created by `Grammars`, so it cannot be sent.
    """
    constraint = request.constraint
    if constraint is not None and not isinstance(constraint, CompiledGrammar):
        raise TypeError(
            f"constraint is of type {type(constraint).__name__}, which cannot be sent to a replica; create it with "
            "jspec.engine.grammars.Grammars."
        )


def continuation_message(request: Request, result: Result, avoid: frozenset[str]) -> RequestMessage:
    """Return a message that requests what follows the tokens of `result`."""
    constraint = request.constraint
    rest = dataclasses.replace(
        request,
        key=None,
        constraint=None,
        generated=(*request.generated, *result.tokens),
        prompt_logprobs=request.prompt_logprobs and not result.prompt_logprobs,
    )
    key = None if request.key is None else np.asarray(jax.random.key_data(request.key))
    return RequestMessage(rest, key, constraint.source if isinstance(constraint, CompiledGrammar) else None, avoid)


class ResultDelta(NamedTuple):
    """The part of a result that is new since the previous delta.

    Attributes:
        replica: the id of the replica.
        waited: how many seconds the request waited for a slot; None if it is still waiting.
        entries: the new entries of the result's lists.
        values: the result's other fields. "distortion" counts only the new tokens.
    """

    replica: str
    waited: float | None
    entries: dict[str, list[Any]]
    values: dict[str, Any]

    def apply_to(self, result: Result) -> None:
        """Append the delta to `result`."""
        for name in _LISTS:
            getattr(result, name).extend(self.entries.get(name, ()))
        result.distortion += self.values["distortion"]
        result.error, result.error_code = self.values["error"], self.values["error_code"]
        result.finish_reason = self.values["finish_reason"]


class DeltaReader:
    """Read the deltas of a request's result while the engine's thread extends it."""

    def __init__(self, active: ActiveRequest, replica: str):
        self._active, self._replica, self._arrived = active, replica, time.monotonic()
        self._sent, self._distortion = dict.fromkeys(_LISTS, 0), 0.0

    def next(self) -> ResultDelta:
        """Return the next delta, which may have no tokens."""
        result, assigned_at = self._active.result, self._active.assigned_at
        reason = result.finish_reason  # read before the tokens, because no token arrives after the finish reason
        # The engine extends the origins first and the tokens last. If it is in between, it will notify the listener.
        is_complete = len(result.origins) == len(result.tokens) > self._sent["tokens"] or reason is not None
        entries = dict[str, list[Any]]()
        for name in _LISTS if is_complete else ():
            new = getattr(result, name)[self._sent[name] :]
            if new:
                entries[name], self._sent[name] = new, self._sent[name] + len(new)
        distortion = result.distortion - self._distortion if is_complete else 0.0
        self._distortion += distortion
        values = {"finish_reason": reason, "error": result.error, "error_code": result.error_code}
        waited = None if assigned_at is None else max(0.0, assigned_at - self._arrived)
        return ResultDelta(self._replica, waited, entries, values | {"distortion": distortion, "cached": result.cached})
