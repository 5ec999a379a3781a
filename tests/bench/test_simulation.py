"""The simulation of replicas agrees with queueing theory, and loses no request or token."""

import statistics

import pytest

pytest.importorskip("ray.serve")

from bench.simulation import ServiceTimes, Simulation, Workload

TIMES = ServiceTimes(prefill=2000, decode=tuple(100 / (1 + 0.3 * i) for i in range(8)), restart=30)


def simulated(times, workload, *args, **options):
    simulation = Simulation(times, workload, *args, **options)
    simulation.run()
    return simulation


def workload(count, requests=100, rate=2.0):
    return Workload(rate * count, requests * count, 4 * count, 512, 32, 64)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_waiting_time_of_one_slot_is_that_of_an_m_m_1_queue(load, report):
    """With one slot and no prefill, the mean wait is ``load / (1 - load)`` times the mean service time."""
    service = 64.5 / 50  # seconds; an exponential time that is rounded up has half a token more on average
    times = ServiceTimes(prefill=1e12, decode=(50.0,), restart=1)
    waits = [
        statistics.mean(job.started - job.arrived for job in simulated(times, work, 1, "random", seed=seed).jobs)
        for seed in range(5)
        for work in [Workload(load / service, 20_000, 1, 32, 1, 64)]
    ]
    expected = load / (1 - load) * service
    report(load=load, wait=round(statistics.mean(waits), 3), expected=round(expected, 3))
    assert statistics.mean(waits) == pytest.approx(expected, rel=0.05)


def test_lone_request_takes_its_prefill_and_its_tokens():
    (job,) = simulated(TIMES, Workload(1, 1, 1, 512, 32, 64), 1, "prefix").jobs
    assert job.first_token - job.started == pytest.approx(544 / 2000)
    assert job.finished - job.first_token == pytest.approx(job.output / 100)


@pytest.mark.parametrize("routing", ["random", "two choices", "prefix"])
def test_failures_lose_nothing(routing):
    """Every request ends with all its tokens, and a moved one prefills the tokens that it already has."""
    done = simulated(TIMES, workload(10), 10, routing, mean_time_to_failure=60)
    moved = [job for job in done.jobs if job.moves]
    assert len(done.jobs) == 1000 and all(
        job.finished > job.first_token >= job.started >= job.arrived for job in done.jobs
    )
    assert all(job.delivered == job.output for job in done.jobs) and not any(replica.jobs for replica in done.replicas)
    assert len(moved) > 10
    texts = [(job.prefilled + job.saved - (job.moves + 1) * (512 + 32), job.moves * job.output) for job in moved]
    assert all(0 <= again <= most for again, most in texts) and sum(again for again, _ in texts) > 0
    assert all(job.prefilled + job.saved == 512 + 32 for job in done.jobs if not job.moves)
    assert done.free == 8 * sum(replica.is_alive for replica in done.replicas) and not done.waiting


def test_prefix_routing_saves_prefill_and_two_choices_reduce_waiting(report):
    """Prefix routing reuses most prefixes, and two choices wait less than random routing."""
    figures = {}
    for routing in ("random", "two choices", "prefix"):
        jobs = simulated(TIMES, workload(20), 20, routing).jobs
        saved = sum(job.saved for job in jobs) / sum(job.saved + job.prefilled for job in jobs)
        figures[routing] = saved, statistics.mean(job.first_token - job.arrived for job in jobs)
    report(**{name: f"{saved:.0%}, {first:.2f} s" for name, (saved, first) in figures.items()})
    assert figures["prefix"][0] > 0.6 > 0.2 > figures["two choices"][0]
    assert figures["prefix"][1] < figures["two choices"][1] < figures["random"][1]
