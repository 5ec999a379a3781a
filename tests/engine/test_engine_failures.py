"""Failing engine calls: which requests continue, which are given up, and that a failing request fails alone."""

import itertools
import random

import pytest

from jspec.engine.loop import Loop
from jspec.engine.request import Request
from support.fake_runner import KEY, FakeRunner, make_active


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch):
    """Advance the clock by a millisecond per reading, because the engine decides by measured times whether to draft."""
    clock = itertools.count()
    monkeypatch.setattr("jspec.engine.round_budget.perf_counter", lambda: next(clock) / 1000)


def run_all(loop, runner, active_requests, failing, call="decode_rounds"):
    """Run until all requests have ended, with the device's method `call` replaced by `failing`."""
    setattr(runner, call, failing)
    for active in active_requests:
        loop.submit(active)
    while loop.is_busy:
        loop.turn()


def test_request_that_always_fails_is_given_up():
    """A request is given up although others progress: a call whose output is not delivered counts as failed."""
    loop = Loop(FakeRunner(), 8, 1.0)
    bad, good = (make_active(Request((i, 7, 7), 50, key=KEY), print) for i in (1, 2))
    bad.result.drafted = None  # no output can be appended to it
    loop.submit(bad)
    loop.submit(good)
    loop._length_policy.next = lambda lengths, *_: lengths[-1]  # draft, whatever the fake device's calls seem to cost
    for _ in range(60):
        loop.turn()
    assert bad.result.finish_reason == "error" and good.result.finish_reason == "length" and not loop.is_busy


@pytest.mark.parametrize("drafting", [False, True], ids=["any call", "calls that draft"])
@pytest.mark.parametrize(
    "bad", [{0}, {1}, {5}, {0, 1}, {1, 3}, {2, 3}, {1, 2, 3}, {0, 2, 4}, {0, 1, 2, 3}, {1, 2, 3, 4, 5}]
)
def test_failing_requests_fail_alone(bad, drafting):
    """A failing request fails alone, in any slot and at any stage: neighbours and later requests finish."""
    runner = FakeRunner()
    loop, decode_rounds = Loop(runner, 8, 1.0), runner.decode_rounds
    loop._length_policy.next = lambda lengths, *_: lengths[-1]  # draft, whatever the fake device's calls seem to cost
    lengths = [(40, 20) if i == 4 else (2, 50) for i in range(6)]
    active_requests = [
        make_active(Request((i + 1, *[7] * one), new, key=KEY), print) for i, (one, new) in enumerate(lengths)
    ]

    def failing(*of):
        there = any(move and text[0] - 1 in bad for move, text in zip(runner.moves, runner.texts, strict=True))
        runner.fails = there and of[0] >= drafting
        return decode_rounds(*of)

    run_all(loop, runner, active_requests, failing)
    assert {i for i, active in enumerate(active_requests) if active.result.finish_reason == "error"} == bad
    whole = [[1000 * (i + 1) + j for j in range(new)] for i, (_, new) in enumerate(lengths)]
    assert all(i in bad or active.result.tokens == whole[i] for i, active in enumerate(active_requests))


@pytest.mark.parametrize("call", ["assign_slot", "prefill", "decode_rounds"])
def test_random_failing_requests_fail_alone(call, report):
    """Random requests finish wherever the device fails because of some others."""
    lost, others = 0, 0
    for seed in range(200):
        rng, runner = random.Random(seed), FakeRunner()
        loop, plain, count = Loop(runner, 8, 1.0), getattr(runner, call), rng.randint(2, 9)
        sizes = [(rng.randint(1, 40), rng.randint(1, 15)) for _ in range(count)]
        active_requests = [
            make_active(Request((i, *[7] * one), new, key=KEY), print) for i, (one, new) in enumerate(sizes)
        ]
        bad = set(rng.sample(range(count), rng.randint(1, count - 1)))

        def failing(*of, runner=runner, loop=loop, plain=plain, bad=bad):
            moving = [text[0] for move, text in zip(runner.moves, runner.texts, strict=True) if move]
            about = moving if call == "decode_rounds" else [loop._scheduler.active_requests[of[0]].prefix_tokens[0]]
            if bad.intersection(about):
                raise RuntimeError("planted")
            return plain(*of)

        run_all(loop, runner, active_requests, failing, call)
        ended = {i for i, active in enumerate(active_requests) if active.result.finish_reason == "error"}
        assert bad <= ended, "each is given up"
        lost, others = lost + len(ended - bad), others + count - len(bad)
    report(lost=lost, of=others)
    assert lost == 0


def test_occasional_failures_end_no_request():
    """Occasional failures end no request, not even one that is in prefill throughout."""
    runner = FakeRunner()
    loop, calls, decode_rounds = Loop(runner, 8, 1.0), itertools.count(1), runner.decode_rounds
    active_requests = [make_active(Request((i + 1, *[7] * (40 * i)), 20, key=KEY), print) for i in range(2)]

    def failing(*of):
        runner.fails = next(calls) % 5 == 0
        return decode_rounds(*of)

    run_all(loop, runner, active_requests, failing)
    assert {active.result.finish_reason for active in active_requests} == {"length"} and next(calls) > 15


def test_permanently_failing_device_is_given_up():
    runner = FakeRunner()
    loop = Loop(runner, 8, 1.0)
    active_requests = [make_active(Request((i, 7, 7), 50, key=KEY), print) for i in range(1, 6)]
    for active in active_requests:
        loop.submit(active)
    for _ in range(60):
        runner.fails = True
        loop.turn()
    assert {active.result.finish_reason for active in active_requests} == {"error"} and not loop.is_busy


def test_failed_reset_ends_all_requests():
    runner = FakeRunner()
    loop = Loop(runner, 8, 1.0)
    active_requests = [make_active(Request((i, 7, 7), 50, key=KEY), print) for i in range(1, 6)]
    for active in active_requests:
        loop.submit(active)
    runner.fails, runner.reset = True, lambda: 1 / 0
    for _ in range(3):
        loop.turn()
    assert {active.result.error for active in active_requests} == {"ZeroDivisionError: division by zero"}
