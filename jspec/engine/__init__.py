"""Continuous batching: requests join and leave a batch that is decoded in the rounds of `speculative_generate`."""

from jspec.engine.engine import Engine
from jspec.engine.request import Request, Result

__all__ = ["Engine", "Request", "Result"]
