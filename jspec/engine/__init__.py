"""Continuous batching: requests join and leave one batch, decoded with the rounds of `speculative_generate`."""

from jspec.engine.engine import Engine
from jspec.engine.request import Request, Result

__all__ = ["Engine", "Request", "Result"]
