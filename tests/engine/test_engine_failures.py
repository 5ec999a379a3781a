"""Calls of an engine that fail: who goes on, who is given up, and that it takes nobody along."""

import itertools
import random

import pytest

from jspec.engine.loop import Loop
from jspec.engine.request import Request
from support.fake_device import KEY, FakeDevice, tenant_of


def play_all(loop, device, tenants, failing, call="play"):
    """Until all have ended, with that in the place of a call of the device."""
    setattr(device, call, failing)
    for tenant in tenants:
        loop.submit(tenant)
    while loop.is_busy:
        loop.turn()


def test_a_request_that_always_fails_is_given_up():
    """Though others are answered meanwhile: a call that was not handed on counts as one that failed."""
    loop = Loop(FakeDevice(), 8, 1.0)
    bad, good = (tenant_of(Request((i, 7, 7), 50, key=KEY), print) for i in (1, 2))
    bad.result.drafted = None  # nothing can be added to it
    loop.submit(bad)
    loop.submit(good)
    for _ in range(60):
        loop.turn()
    assert bad.result.finish_reason == "error" and good.result.finish_reason == "length" and not loop.is_busy


@pytest.mark.parametrize("drafting", [False, True], ids=["any call", "calls that draft"])
@pytest.mark.parametrize(
    "bad", [{0}, {1}, {5}, {0, 1}, {1, 3}, {2, 3}, {1, 2, 3}, {0, 2, 4}, {0, 1, 2, 3}, {1, 2, 3, 4, 5}]
)
def test_who_makes_calls_fail_takes_nobody_along(bad, drafting):
    """Wherever it stands, and where it goes well at first: neither those beside it nor those that come later."""
    device = FakeDevice()
    loop, play = Loop(device, 8, 1.0), device.play
    lengths = [(40, 20) if i == 4 else (2, 50) for i in range(6)]
    tenants = [tenant_of(Request((i + 1, *[7] * one), new, key=KEY), print) for i, (one, new) in enumerate(lengths)]

    def failing(*of):
        there = any(move and text[0] - 1 in bad for move, text in zip(device.moves, device.texts, strict=True))
        device.fails = there and of[0] >= drafting
        return play(*of)

    play_all(loop, device, tenants, failing)
    assert {i for i, tenant in enumerate(tenants) if tenant.result.finish_reason == "error"} == bad
    whole = [[1000 * (i + 1) + j for j in range(new)] for i, (_, new) in enumerate(lengths)]
    assert all(i in bad or tenant.result.tokens == whole[i] for i, tenant in enumerate(tenants))


@pytest.mark.parametrize("call", ["seat", "read", "play"])
def test_of_requests_that_fail_none_takes_another_along(call, report):
    """Made-up ones, wherever the device fails because of some of them."""
    lost, others = 0, 0
    for seed in range(200):
        rng, device = random.Random(seed), FakeDevice()
        loop, plain, count = Loop(device, 8, 1.0), getattr(device, call), rng.randint(2, 9)
        sizes = [(rng.randint(1, 40), rng.randint(1, 15)) for _ in range(count)]
        tenants = [tenant_of(Request((i, *[7] * one), new, key=KEY), print) for i, (one, new) in enumerate(sizes)]
        bad = set(rng.sample(range(count), rng.randint(1, count - 1)))

        def failing(*of, device=device, loop=loop, plain=plain, bad=bad):
            moving = [text[0] for move, text in zip(device.moves, device.texts, strict=True) if move]
            about = moving if call == "play" else [loop._scheduler.tenants[of[0]].given[0]]
            if bad.intersection(about):
                raise RuntimeError("planted")
            return plain(*of)

        play_all(loop, device, tenants, failing, call)
        ended = {i for i, tenant in enumerate(tenants) if tenant.result.finish_reason == "error"}
        assert bad <= ended, "each is given up"
        lost, others = lost + len(ended - bad), others + count - len(bad)
    report(lost=lost, of=others)
    assert lost == 0


def test_failures_now_and_then_end_nobody():
    """Not even who is being read all the while."""
    device = FakeDevice()
    loop, calls, play = Loop(device, 8, 1.0), itertools.count(1), device.play
    tenants = [tenant_of(Request((i + 1, *[7] * (40 * i)), 20, key=KEY), print) for i in range(2)]

    def failing(*of):
        device.fails = next(calls) % 5 == 0
        return play(*of)

    play_all(loop, device, tenants, failing)
    assert {tenant.result.finish_reason for tenant in tenants} == {"length"} and next(calls) > 15


def test_a_device_that_always_fails_is_given_up():
    device = FakeDevice()
    loop, tenants = Loop(device, 8, 1.0), [tenant_of(Request((i, 7, 7), 50, key=KEY), print) for i in range(1, 6)]
    for tenant in tenants:
        loop.submit(tenant)
    for _ in range(60):
        device.fails = True
        loop.turn()
    assert {tenant.result.finish_reason for tenant in tenants} == {"error"} and not loop.is_busy


def test_a_device_that_cannot_be_emptied_ends_all():
    device = FakeDevice()
    loop, tenants = Loop(device, 8, 1.0), [tenant_of(Request((i, 7, 7), 50, key=KEY), print) for i in range(1, 6)]
    for tenant in tenants:
        loop.submit(tenant)
    device.fails, device.reset = True, lambda: 1 / 0
    for _ in range(3):
        loop.turn()
    assert {tenant.result.error for tenant in tenants} == {"ZeroDivisionError: division by zero"}
