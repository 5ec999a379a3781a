"""A request router that prefers the replica that holds a request's prefix, unless this replica is too busy."""

import itertools
import random
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jspec.cluster.serve.messages import RequestMessage

_BLOCK_SIZE = 32  # tokens
_MAX_BLOCKS = 2**16  # blocks to remember


class PrefixTable:
    """A table of the replica that last prefilled each prefix.

    Texts are divided into blocks. The key of a block is the hash of the text up to the block's end.
    """

    def __init__(self) -> None:
        self._replicas = OrderedDict[int, str]()  # the replica that read each block last, from the oldest block

    def add(self, text: Sequence[int], salt: str, replica: str) -> None:
        """Record that `replica` prefills `text`."""
        for block in _blocks(text, salt):
            self._replicas[block] = replica
            self._replicas.move_to_end(block)
        while len(self._replicas) > _MAX_BLOCKS:
            self._replicas.popitem(last=False)

    def holder_of_prefix(self, text: Sequence[int], salt: str) -> str | None:
        """Return the replica that has prefilled the longest prefix of `text`, or None."""
        replica = None
        for block in _blocks(text, salt):
            if block not in self._replicas:
                break
            replica = self._replicas[block]
        return replica


def _blocks(text: Sequence[int], salt: str) -> list[int]:
    """Return the hash of each prefix that ends with a whole block."""
    size = _BLOCK_SIZE
    starts = range(0, len(text) - size + 1, size)
    return [*itertools.accumulate((hash(tuple(text[i : i + size])) for i in starts), _mix, initial=hash(salt))][1:]


def _mix(before: int, block: int) -> int:
    return hash((before, block))


class PrefixRouter(RequestRouter):
    """Route requests by prefix and load.

    The router picks two replicas at random. It prefers the replica that has prefilled the longest prefix of the
    request's text, unless this replica has over `slack` more requests than the less busy of the two. Otherwise it
    prefers the less busy of the two.
    """

    def initialize_state(self, **kwargs: int) -> None:
        """Set up the router with `slack` from Ray Serve's `request_router_kwargs`."""
        self._slack, self._table = kwargs["slack"], PrefixTable()
        self._requests = defaultdict[str, set[str]](set)  # the ids of each replica's requests from this process

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas in the order in which to ask them."""
        message = _message_of(pending_request)
        avoid = frozenset[str]() if message is None else message.avoid
        candidates = [replica for replica in candidate_replicas if replica.replica_id.unique_id not in avoid]
        candidates = candidates or candidate_replicas
        choices = random.sample(candidates, min(2, len(candidates)))
        choices.sort(key=self._num_requests)
        holder = None if message is None else self._table.holder_of_prefix(message.text, message.request.salt)
        for replica in candidates:
            is_holder = replica.replica_id.unique_id == holder
            if is_holder and self._num_requests(replica) <= self._num_requests(choices[0]) + self._slack:
                choices = [replica, *(choice for choice in choices if choice is not replica)]
        return [[choice] for choice in choices]

    def _num_requests(self, replica: RunningReplica) -> int:
        return len(self._requests[replica.replica_id.unique_id])

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record which replica prefills the request's text."""
        self._requests[replica_id.unique_id].add(pending_request.metadata.internal_request_id)
        if (message := _message_of(pending_request)) is not None:
            self._table.add(message.text, message.request.salt, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Record that a request has left the replica, or that the replica has rejected it."""
        self._requests[replica_id.unique_id].discard(internal_request_id)


def _message_of(pending: PendingRequest | None) -> RequestMessage | None:
    """Return the message that a request carries; None for other calls of the replicas."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, RequestMessage) else None
