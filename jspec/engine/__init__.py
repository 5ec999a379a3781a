"""Requests that come and go, decoded as one batch: continuous batching on the round of `speculative_generate`."""

from jspec.engine.engine import Engine
from jspec.engine.request import Request, Result

__all__ = ["Engine", "Request", "Result"]
