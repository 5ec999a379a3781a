"""A discrete-event simulation of replicas that serve requests, fail and restart, with jspec's own router.

A replica decodes all its running requests at once. Its speed depends only on their number. A prefill counts as the
number of tokens that a lone request would decode in the time of the prefill. "random" routing bypasses the router.
"""

import dataclasses
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from jspec.cluster.serve.messages import RequestMessage
from jspec.cluster.serve.prefix_router import PrefixRouter
from jspec.engine import Request

_ATTEMPTS = 20  # to find a replica with a free slot, before the least busy one is taken


@dataclasses.dataclass(frozen=True)
class ServiceTimes:
    """The measured speed of a replica.

    Attributes:
        prefill: the tokens per second that it prefills.
        decode: the tokens per second of each request, while 1, 2, ... requests are running. Its length is the number of
            slots.
        restart: the seconds from a failure until the replica accepts requests again.
    """

    prefill: float
    decode: tuple[float, ...]
    restart: float


@dataclasses.dataclass(frozen=True)
class Workload:
    """Random requests, which arrive as a Poisson process and share a limited number of prefixes.

    Attributes:
        rate: the requests per second, over all replicas.
        count: the number of requests.
        prefixes: the number of different prefixes.
        prefix, question: the number of tokens in a prefix, and in what follows it.
        output: the mean of the exponential distribution from which numbers of new tokens are drawn, before rounding up.
    """

    rate: float
    count: int
    prefixes: int
    prefix: int
    question: int
    output: int


@dataclasses.dataclass(eq=False)
class Job:
    """A request and its progress. Times are in seconds since the start.

    Attributes:
        output: the number of new tokens.
        prefill, decode: the remaining work, in decoded tokens.
        delivered: the number of new tokens when the request last moved, or at its end.
        saved, prefilled: the numbers of tokens that replicas already held, and that they prefilled.
        moves: how often the request moved to another replica.
    """

    arrived: float
    prefix: int
    message: RequestMessage
    output: int
    prefill: float = 0.0
    decode: float = 0.0
    delivered: int = 0
    saved: int = 0
    prefilled: int = 0
    moves: int = 0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclasses.dataclass(eq=False)
class Slot:
    """A slot, with its running job if any, and the prefix of its text. `used` is when its last job started."""

    prefix: int | None = None
    job: Job | None = None
    used: float = 0.0

    @property
    def holds_prefix(self) -> bool:
        """Whether the prefix has been prefilled."""
        return self.prefix is not None and (self.job is None or self.job.prefill == 0)


class Replica:
    """A replica, its slots, and its running jobs."""

    def __init__(self, number: int, slots: int):
        self.replica_id = SimpleNamespace(unique_id=str(number))
        self.slots = [Slot() for _ in range(slots)]
        self.jobs: list[Job] = []
        self.is_alive, self.updated, self.version = True, 0.0, 0

    def assign_slot(self, job: Job, now: float) -> bool:
        """Give `job` a free slot, and return whether its prefix is cached.

        A slot that holds the prefix comes first, then the least recently used one. A running slot's prefix is copied.
        """
        free = sorted((slot for slot in self.slots if slot.job is None), key=lambda slot: slot.used)
        held = [slot for slot in self.slots if slot.prefix == job.prefix and slot.holds_prefix]
        slot = next((slot for slot in held if slot.job is None), free[0])
        slot.prefix, slot.job, slot.used = job.prefix, job, now
        self.jobs.append(job)
        return bool(held)


class Simulation:
    """A simulation of one workload on several replicas. `jobs` holds all requests afterwards.

    Args:
        routing: "random", "two choices" (the less busy of two random replicas) or "prefix" (as jspec routes).
        mean_time_to_failure: of each replica, in seconds; None for no failures.
    """

    def __init__(
        self,
        times: ServiceTimes,
        workload: Workload,
        num_replicas: int,
        routing: str,
        mean_time_to_failure: float | None = None,
        seed: int = 0,
    ):
        self.times, self.workload, self.routing = times, workload, routing
        self.mean_time_to_failure = mean_time_to_failure
        self.random = random.Random(seed)
        self.replicas = [Replica(i, len(times.decode)) for i in range(num_replicas)]
        self.router: Any = PrefixRouter.__new__(PrefixRouter)  # without Ray's part of it
        self.router.initialize_state(slack=len(times.decode) // 2)
        self.now, self.free = 0.0, num_replicas * len(times.decode)
        self.waiting: deque[Job] = deque()
        self.jobs: list[Job] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._finished = 0
        self._alive = [*self.replicas]

    def run(self) -> None:
        """Simulate until all requests have finished."""
        random.seed(self.random.random())  # the router's source
        self._schedule(self.random.expovariate(self.workload.rate), self._arrive)
        for replica in self.replicas:
            self._schedule_failure(replica)
        while self._finished < self.workload.count:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _schedule(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _arrive(self) -> None:
        work, draw = self.workload, self.random
        prefix = draw.randrange(work.prefixes)
        text = (*(prefix,) * work.prefix, *(work.prefixes + len(self.jobs),) * work.question)
        message = RequestMessage(Request(text, 1), None, None)
        output = 1 + int(draw.expovariate(1 / work.output))
        self.jobs.append(Job(self.now, prefix, message, output))
        self.waiting.append(self.jobs[-1])
        if len(self.jobs) < work.count:
            self._schedule(self.now + draw.expovariate(work.rate), self._arrive)
        self._dispatch()

    def _dispatch(self) -> None:
        while self.waiting and self.free:
            job = self.waiting.popleft()
            self._start(job, self._choose(job))

    def _choose(self, job: Job) -> Replica:
        alive = self._alive
        message = job.message if self.routing == "prefix" else None
        for _ in range(_ATTEMPTS):
            if self.routing == "random":
                choices = [self.random.choice(alive)]
            else:
                pending = SimpleNamespace(args=(message,)) if message else None
                choices = [choice for (choice,) in _result(self.router.choose_replicas(alive, pending))]
            for replica in choices:
                if len(replica.jobs) < len(self.times.decode):
                    return replica
        return min(alive, key=lambda replica: len(replica.jobs))

    def _start(self, job: Job, replica: Replica) -> None:
        self._advance(replica)
        work = self.workload
        is_cached = replica.assign_slot(job, self.now)
        job.saved += work.prefix if is_cached else 0
        tokens = work.question + job.delivered + (0 if is_cached else work.prefix)
        job.prefilled += tokens
        job.prefill, job.decode = tokens / self.times.prefill * self.times.decode[0], float(job.output - job.delivered)
        job.started = self.now if job.started is None else job.started
        self.free -= 1
        pending = SimpleNamespace(args=(job.message,), metadata=SimpleNamespace(internal_request_id=str(id(job))))
        self.router.on_request_routed(pending, replica.replica_id, None)
        self._schedule_progress(replica)

    def _advance(self, replica: Replica) -> None:
        """Let the running jobs of `replica` progress until now."""
        done = (self.now - replica.updated) * self._speed(replica)
        replica.updated = self.now
        for job in replica.jobs:
            spent = min(job.prefill, done)
            job.prefill -= spent
            job.decode -= done - spent

    def _speed(self, replica: Replica) -> float:
        return self.times.decode[len(replica.jobs) - 1] if replica.jobs else 0.0

    def _schedule_progress(self, replica: Replica) -> None:
        """Schedule the next time at which a running job of `replica` ends its prefill or its decoding."""
        replica.version += 1
        if replica.jobs:
            left = min(job.prefill if job.prefill > 0 else job.decode for job in replica.jobs)
            version = replica.version
            self._schedule(self.now + max(left, 0.0) / self._speed(replica), lambda: self._progress(replica, version))

    def _progress(self, replica: Replica, version: int) -> None:
        if version != replica.version:
            return
        self._advance(replica)
        for job in [*replica.jobs]:
            job.prefill = 0.0 if job.prefill < 1e-9 else job.prefill
            if job.prefill == 0 and job.first_token is None:
                job.first_token = self.now
            if job.prefill == 0 and job.decode < 1e-9:
                job.finished, job.delivered = self.now, job.output
                self._finished += 1
                self._leave(job, replica)
        self._schedule_progress(replica)
        self._dispatch()

    def _leave(self, job: Job, replica: Replica) -> None:
        replica.jobs.remove(job)
        next(slot for slot in replica.slots if slot.job is job).job = None
        self.free += 1
        self.router.on_request_completed(replica.replica_id, str(id(job)))

    def _schedule_failure(self, replica: Replica) -> None:
        if self.mean_time_to_failure is not None:
            wait = self.random.expovariate(1 / self.mean_time_to_failure)
            self._schedule(self.now + wait, lambda: self._fail(replica))

    def _fail(self, replica: Replica) -> None:
        """End a replica. Its requests continue on others, before those that are waiting."""
        self._advance(replica)
        for job in reversed([*replica.jobs]):
            job.delivered = job.output - math.ceil(job.decode - 1e-9)
            job.moves += 1
            self._leave(job, replica)
            self.waiting.appendleft(job)
        replica.is_alive, replica.version = False, replica.version + 1
        self._alive.remove(replica)
        replica.slots = [Slot() for _ in replica.slots]
        self.free -= len(self.times.decode)
        self._schedule(self.now + self.times.restart, lambda: self._restart(replica))
        self._dispatch()

    def _restart(self, replica: Replica) -> None:
        replica.is_alive, replica.updated = True, self.now
        self._alive.append(replica)
        self.free += len(self.times.decode)
        self._schedule_failure(replica)
        self._dispatch()


def _result(coroutine: Any) -> Any:
    """Return the result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("The router waited, but the simulation has no event loop.")
