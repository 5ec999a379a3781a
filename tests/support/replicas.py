"""Replicas in this process that fail as planned. Every message is pickled, as it is between processes."""

import asyncio
import pickle

from jspec.cluster.serve.messages import PER_TOKEN
from jspec.cluster.serve.replica import Replica
from jspec.cluster.serve.replicated_engine import ReplicatedEngine

UNFINISHED = {"finish_reason": None, "distortion": 0.0}


class FlakyReplicas:
    """A set of replicas. Each request goes to the next replica that is not in its `avoid`.

    Args:
        engines: engines that are not running, with their grammars.
        fail: a function ``fail(call, count)`` of the number of the call and of the number of tokens that it has
            delivered. It may raise, or return the number of seconds to hang.

    Attributes:
        messages: the messages received, in order.
    """

    def __init__(self, engines, fail=lambda call, count: 0):
        self.replicas = [Replica(lambda pair=pair: pair, lambda i=i: f"r{i}") for i, pair in enumerate(engines)]
        self._fail, self.messages = fail, []

    async def __call__(self, message):
        message = pickle.loads(pickle.dumps(message))
        call = len(self.messages)
        self.messages.append(message)
        order = [self.replicas[(call + i) % len(self.replicas)] for i in range(len(self.replicas))]
        replica = next((replica for replica in order if replica._id not in message.avoid), order[0])
        deltas, count = replica.decode(message), 0
        try:
            async for whole in deltas:
                for delta in _single_tokens(whole):
                    await asyncio.sleep(self._fail(call, count) or 0)
                    yield pickle.loads(pickle.dumps(delta))
                    count += len(delta.entries.get("tokens", ()))
        finally:
            await deltas.aclose()

    def close(self):
        """Stop the engines."""
        for replica in self.replicas:
            replica._engine.close(cancel=True)


def _single_tokens(delta):
    """Split a delta, so that no part has more than one token. The first part has the entries that are not per token."""
    count = max(1, len(delta.entries.get("tokens", ())))
    for i in range(count):
        entries = {name: values[i : i + 1] for name, values in delta.entries.items() if name in PER_TOKEN}
        if i == 0:
            entries |= {name: values for name, values in delta.entries.items() if name not in PER_TOKEN}
        is_last = i == count - 1
        yield delta._replace(entries=entries, values=delta.values if is_last else delta.values | UNFINISHED)


def decode(replicas, requests):
    """Return the results of `requests` on an engine with these replicas, and the engine."""

    async def run():
        engine = ReplicatedEngine(replicas, replicas.replicas[0].info(), len(replicas.replicas))
        return await asyncio.to_thread(engine.generate, requests), engine

    return asyncio.run(run())
