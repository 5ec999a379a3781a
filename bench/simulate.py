"""A simulation of goodput and queueing in replicas with failures, from measured service times."""

import time
from typing import Any

import numpy as np

import jspec
from bench import plots
from bench.report import publish
from bench.simulation import ServiceTimes, Simulation, Workload
from bench.subject import Subject
from jspec.engine import Engine, Request

_ROUTING = "random", "two choices", "prefix"
_PREFIX, _QUESTION, _OUTPUT = 512, 32, 256  # tokens
_PREFIXES = 4  # per replica
_LEAST = 4000  # requests
_WAIT = 2.0  # seconds for the first token, at most, in good requests


def run(
    subject: Subject, slots: int, sizes: list[int], per_replica: int, load: float, failure: float, restart: float
) -> None:
    """Publish a table with a row for each number of replicas and each routing, with and without failures.

    Args:
        sizes: the numbers of replicas.
        per_replica: the number of requests per replica. There are at least 4,000 in all.
        load: the request rate, as a share of the capacity of replicas that prefill every prefix.
        failure: the mean time from a replica's start to its failure, in seconds.
        restart: the time that a replica needs to start, in seconds.
    """
    times = measure(subject, slots, restart)
    rows = []
    for count in sizes:
        rate, requests = load * count * capacity(times), max(_LEAST, per_replica * count)
        work = Workload(rate, requests, _PREFIXES * count, _PREFIX, _QUESTION, _OUTPUT)
        for mean_time in (None, failure):
            for routing in _ROUTING:
                simulation = Simulation(times, work, count, routing, mean_time)
                simulation.run()
                rows.append(
                    {"replicas": count, "failures": mean_time is not None, "routing": routing} | _row(simulation)
                )
    decode = ", ".join(f"{speed:.0f}" for speed in times.decode)
    publish(
        f"simulation-{subject.name}-load-{load:g}",
        f"Simulated replicas of {subject.name} with {slots} slots, at {load:.0%} of their capacity",
        rows,
        plots.bars("routing", "good"),
        notes=[
            f"Measured: {times.prefill:.0f} tokens/s of prefill; {decode} tokens/s for each of 1, 2, ... requests.",
            f"With failures, a replica fails {failure:g} s after its start on average, and takes {restart:g} s to "
            f"restart. There are {_PREFIXES} prefixes per replica. A prompt has a prefix ({_PREFIX} tokens) and "
            f"{_QUESTION} more tokens. An output has about {_OUTPUT} tokens on average.",
            f"A request is good if its first token arrives within {_WAIT:g} s.",
        ],
        folder=subject.folder,
    )


def capacity(times: ServiceTimes) -> float:
    """Return the requests per second that a replica serves if all its slots are busy and it prefills every prefix."""
    work = (_PREFIX + _QUESTION) / times.prefill * times.decode[0] + _OUTPUT
    return len(times.decode) * times.decode[-1] / work


def _row(simulation: Simulation) -> dict[str, Any]:
    jobs = simulation.jobs[len(simulation.jobs) // 5 :]  # without those that found idle replicas
    first = np.array([(job.first_token or 0) - job.arrived for job in jobs])
    queued = np.array([(job.started or 0) - job.arrived for job in jobs])
    tokens = sum(job.output for job in simulation.jobs) / simulation.now
    saved, prefilled = (sum(getattr(job, name) for job in jobs) for name in ("saved", "prefilled"))
    return {
        "tokens/s per replica": tokens / len(simulation.replicas),
        "queued, mean s": float(queued.mean()),
        "first token, p50 s": float(np.quantile(first, 0.5)),
        "first token, p99 s": float(np.quantile(first, 0.99)),
        "good": float((first <= _WAIT).mean()),
        "prefill saved": saved / (saved + prefilled),
        "moved": sum(job.moves for job in simulation.jobs),
    }


def measure(subject: Subject, slots: int, restart: float) -> ServiceTimes:
    """Measure the speeds of prefill and of decoding with 1, 2, 4, ... requests; interpolate between them."""
    counts = sorted({*(2**i for i in range(slots.bit_length()) if 2**i <= slots), slots})
    (row,), _, _ = subject.request(1, 32)
    text = tuple(int(token) for token in row)
    long = (text * (_PREFIX // len(text) + 1))[:_PREFIX]
    with Engine(subject.target, subject.draft, slots=slots, max_length=2 * _PREFIX) as engine:
        prefill = min(_seconds(engine, [Request(long, 1, salt=f"prefill {i}")]) for i in range(4))
        speeds = []
        for count in counts:
            requests = [Request(text, 96, jspec.SamplingParams(), salt=f"{count} {i}") for i in range(count)]
            speeds.append(96 / min(_seconds(engine, requests) for _ in range(3)))
    return ServiceTimes(_PREFIX / prefill, tuple(np.interp(range(1, slots + 1), counts, speeds).tolist()), restart)


def _seconds(engine: Engine, requests: list[Request]) -> float:
    begun = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - begun
