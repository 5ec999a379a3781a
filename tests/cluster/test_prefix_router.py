"""Requests are routed by prefix and load, and away from unresponsive replicas."""

import asyncio
import itertools
import types

import pytest

from jspec.cluster.serve.messages import RequestMessage
from jspec.engine import Request

pytest.importorskip("ray")
from jspec.cluster.serve.prefix_router import PrefixRouter, PrefixTable

PROMPT = tuple(range(100))


class Router(PrefixRouter):
    """A router without Ray's state. The keywords are the number of requests in each replica."""

    def __init__(self, **busy):
        self.names, self.numbers = [*busy], itertools.count()
        self.initialize_state(slack=2)
        self.fill(**busy)

    def fill(self, **busy):
        """Set the number of requests in some replicas."""
        for name, count in busy.items():
            self._requests[name] = {f"{name}{i}" for i in range(count)}

    def ranks(self, pending):
        """Return the replicas to ask, in order."""
        replicas = [types.SimpleNamespace(replica_id=types.SimpleNamespace(unique_id=name)) for name in self.names]
        return [replica for [replica] in asyncio.run(self.choose_replicas(replicas, pending))]

    def first(self, prompt=PROMPT, salt="", avoid=(), ends=True):
        """Return the replica to ask first, and let it read the request."""
        message = RequestMessage(Request(prompt, 4, salt=salt), None, None, frozenset(avoid))
        metadata = types.SimpleNamespace(internal_request_id=str(next(self.numbers)))
        pending = types.SimpleNamespace(args=[message], metadata=metadata)
        chosen = self.ranks(pending)[0].replica_id
        self.on_request_routed(pending, chosen, None)
        if ends:
            self.on_request_completed(chosen, metadata.internal_request_id)
        return chosen.unique_id


def test_request_goes_to_the_replica_that_has_read_its_prefix():
    router = Router(a=0, b=0, c=0)
    holder = router.first()
    assert {router.first(PROMPT[:70] + (7,) * i) for i in range(20)} == {holder}
    assert len({router.first((i, *PROMPT)) for i in range(40)}) == 3, "other texts are spread"
    assert len({router.first(salt=str(i)) for i in range(40)}) == 3, "other salts share nothing"


def test_busy_holder_gives_way():
    """The holder gets the request while it has at most `slack` requests more than the other choice."""
    router = Router(a=0, b=0)
    holder = router.first()
    [other] = {"a", "b"} - {holder}
    assert [router.first(ends=False) for _ in range(4)] == [holder] * 3 + [other]


def test_less_busy_of_two_is_asked_first_and_both_are_asked():
    router = Router(a=5, b=1)
    assert {router.first((i,)) for i in range(10)} == {"b"}
    assert [replica.replica_id.unique_id for replica in router.ranks(None)] == ["b", "a"]
    router.on_request_completed(types.SimpleNamespace(unique_id="b"), "rejected before it was routed")
    assert router.first() == "b"


def test_unresponsive_replicas_are_avoided_unless_there_are_no_others():
    router = Router(a=0, b=9)
    router.first(avoid="b")
    assert router.first(avoid="a") == "b"
    assert router.first(avoid="ab") in "ab"


def test_calls_without_a_message_are_routed():
    for pending in (None, types.SimpleNamespace(args=[])):
        assert [replica.replica_id.unique_id for replica in Router(a=0).ranks(pending)] == ["a"]


def test_table_forgets_the_oldest_prefixes(monkeypatch):
    monkeypatch.setattr("jspec.cluster.serve.prefix_router._MAX_BLOCKS", 4)
    table = PrefixTable()
    table.add((1,) * 64, "", "a")
    table.add((2,) * 64, "", "b")
    table.add((1,) * 64, "", "c")
    table.add((3,) * 64, "", "d")
    assert [table.holder_of_prefix((i,) * 70, "") for i in (1, 2, 3)] == ["c", None, "d"]
    assert table.holder_of_prefix((1,) * 31, "") is None
