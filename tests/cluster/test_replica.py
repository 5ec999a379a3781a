"""When a replica compiles its programs for constrained requests: not at its start, but once it is idle."""

import asyncio
from types import SimpleNamespace

import pytest

from jspec.cluster.serve.replica import Replica
from jspec.engine import Request, Result


class Engine:
    """An engine that records whether it was asked to compile programs for constrained requests."""

    def __init__(self):
        self.running_requests, self.num_waiting, self.num_expected = [], 0, 0

    def __enter__(self):
        return self

    def trouble(self):
        return ""

    def expect_constraints(self):
        self.num_expected += 1

    def submit(self, request, listen):
        result = Result(finish_reason="length")
        return SimpleNamespace(result=result, assigned_at=0.0)


async def decode(replica):
    message = SimpleNamespace(to_request=lambda _: Request((1,), 1))
    return [delta async for delta in replica.decode(message)]


@pytest.mark.parametrize("has_grammars", [True, False])
def test_constrained_programs_are_compiled_after_the_first_requests(has_grammars):
    """Ray checks the health of a replica at its start, before any request."""
    engine = Engine()
    replica = Replica(lambda: (engine, object() if has_grammars else None), lambda: "a")
    replica.check_health()
    assert engine.num_expected == 0
    assert len(asyncio.run(decode(replica))) == 1
    engine.running_requests = [object()]
    replica.check_health()
    engine.running_requests, engine.num_waiting = [], 1
    replica.check_health()
    assert engine.num_expected == 0
    engine.num_waiting = 0
    for _ in range(2):
        replica.check_health()
        assert engine.num_expected == has_grammars
