"""An engine under what should not happen: whoever is not concerned does not notice, and nobody waits for ever."""

import asyncio
import dataclasses
import itertools
import queue
import time

import jax
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from jspec.engine import Engine, Request
from jspec.engine.loop import Loop
from jspec.engine.runner import Device
from jspec.engine.slot_output import unpack
from jspec.engine.slots import Needs, Sizes
from support import toys
from support.engines import NEW, OPTIONS, check_texts, made
from support.fake_device import KEY, FakeDevice, tenant_of
from support.law import VOCAB

pytestmark = pytest.mark.usefixtures("quick_compile")


class Panic(BaseException):
    """What extension modules raise where they have failed."""


class Anything:
    """A constraint that forbids one token, and may be slow, or fail."""

    def __init__(self, error=None, seconds=0.0):
        self._error, self._seconds = error, seconds

    def allowed(self):
        time.sleep(self._seconds)
        if self._error:
            raise self._error
        return np.array([0xFFFFFFFE], np.uint32)

    def consume(self, token):
        return token != 0

    def rollback(self, count):
        pass


@pytest.fixture(scope="module")
def models():
    target = toys.tiny_llama(0, 3)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.mark.parametrize(
    "drafter",
    [lambda target: target, lambda target: jspec.TreeDrafter(target, jspec.Tree((0, 0))),
     lambda target: jspec.FallbackDrafter(jspec.NGramDrafter(), target)],
)  # fmt: skip
def test_an_engine_without_a_thread_drafts(models, drafter):
    """Also where it has to learn first what that costs, call by call."""
    engine = Engine(models[0], drafter(models[0]), slots=1, max_length=200)
    (*_, result) = engine.here(Request((1, 2), 190, key=jax.random.key(0)))
    assert sum(result.drafted) and len(result.tokens) == 190
    kinds = {kind[0] for kind in engine._loop.pace.costs}
    assert len(kinds) == 2 and all(map(engine._loop.pace.knows, engine._loop.pace.costs)), "few are compiled"
    assert max(engine._loop.pace.costs.values()) < 1, "nothing of what compiling took"


@pytest.mark.parametrize("error", [KeyError("planted"), asyncio.CancelledError(), Panic("planted")])
def test_what_ends_a_thread_ends_one_request(models, error):
    """Raised by who listens, by who makes a constraint, and by a constraint."""

    def fails(*_):
        raise error

    def bad():
        return Anything(error)

    with Engine(*models, **OPTIONS) as engine:
        engine.submit(Request((1, 2), NEW, key=KEY), fails)
        odd = [Request((1, 2), NEW, key=KEY, constraint=make) for make in (fails, bad)]
        requests = made(4, seed=14)
        *results, one, other = engine.generate([*requests, *odd])
        check_texts(models[0], requests, results)
        assert one.is_refused and other.is_refused and "The constraint" in one.error and "failed" in other.error


def test_a_failed_turn_does_not_end_the_thread(models, monkeypatch):
    with Engine(*models, **OPTIONS) as engine:
        turn, fails = engine._loop.turn, [Panic("planted")] * 2

        def failing():
            if fails:
                raise fails.pop()
            turn()

        monkeypatch.setattr(engine._loop, "turn", failing)
        requests = made(3, seed=5)
        check_texts(models[0], requests, engine.generate(requests))


def test_a_cancellation_is_not_taken_back(models):
    """By who closes the engine once more, as its `with` does."""
    with Engine(*models, **OPTIONS) as engine:
        tenants = [engine.submit(Request((1, 2), NEW), print) for _ in range(9)]
        engine._closing = engine._loop.cancels = True
        engine.close()
    assert "cancelled" in {tenant.result.finish_reason for tenant in tenants}


def test_who_is_interrupted_leaves_nothing_running(models, monkeypatch):
    class Interrupted(queue.SimpleQueue):
        def get(self):
            raise KeyboardInterrupt

    with Engine(*models, **OPTIONS) as engine:
        monkeypatch.setattr("jspec.engine.engine.queue.SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([Request((1, 2), NEW)] * 3)
        monkeypatch.undo()
        end = time.monotonic() + 60
        while engine.seated or engine.num_waiting:
            assert time.monotonic() < end


def test_a_failure_between_two_rows_spoils_no_choice(monkeypatch):
    """What was drafted and what was accepted stay in step, else no length could be chosen ever again."""
    loop, tell, fails = Loop(FakeDevice(), 8, 1.0), Loop._tell, [1]

    def failing(self, slot, tenant, new, *rest):
        if fails and len(tenant.result.tokens) > 4:
            raise KeyError(fails.pop())
        return tell(self, slot, tenant, new, *rest)

    monkeypatch.setattr(Loop, "_tell", failing)
    tenants = [tenant_of(Request((i, 7, 7), 50, key=KEY), print) for i in (1, 2, 3)]
    for tenant in tenants:
        loop.submit(tenant)
    while loop.is_busy:
        loop.turn()
        assert all(len(tenant.lengths) == len(tenant.result.accepted) for tenant in tenants)
    assert {tenant.result.finish_reason for tenant in tenants} == {"length"} and not fails


def test_a_journal_with_constraints_is_the_run(models):
    """Replayed without waiting: a constraint that is released has been asked before."""
    with Engine(*models, **OPTIONS, journal=True) as engine:
        slow = [dataclasses.replace(one, constraint=lambda: Anything(seconds=0.003)) for one in made(5, seed=2)]
        engine.generate([*slow, *made(3, seed=3)])
    commands, sizes = list(engine.device.commands), engine.device.sizes
    one, other = (Device(models[0], engine.device.drafter, engine.device.rule, sizes) for _ in range(2))
    steps = itertools.chain.from_iterable((other.replay([command]), other.wait())[0] for command in commands)
    tops = [sizes.top_logprobs if of[3] else 0 for name, of in commands if name == "play"]
    slots = range(OPTIONS["slots"])
    assert any(name == "release" for name, _ in commands)
    for a, b, num_top in zip(one.replay(commands), [*steps], tops, strict=True):
        assert unpack(a, slots, num_top, slots) == unpack(b, slots, num_top, slots)


def test_a_constraint_where_there_is_no_cpu_is_refused(models, monkeypatch):
    monkeypatch.setattr("jspec.engine.engine._has_cpu", lambda: False)
    with Engine(*models, **OPTIONS) as engine, pytest.raises(ValueError, match="let JAX_PLATFORMS name it, too"):
        engine.generate([Request((1, VOCAB - 1), NEW, constraint=Anything)])


@pytest.mark.parametrize(
    "drafter",
    [lambda target: jspec.MixtureDrafter(target, target, 0.5),
     lambda target: jspec.CascadeDrafter(target, jspec.NGramDrafter())],
)  # fmt: skip
def test_what_two_drafters_lack_is_read_before_they_draft(models, drafter):
    """Behind rounds without drafts; else what nobody has read would be missing for good."""
    target, sizes = models[0], Sizes(1, 64, 1, (8,), (0, 8), 4)
    device = Device(target, drafter(target), RULES["rejection"], sizes)
    prompt, stop = tuple(np.random.default_rng(0).integers(VOCAB, size=7).tolist()), np.zeros(1, bool)
    request = Request(prompt, 40, key=KEY)
    device.seat(0, request.row(1, VOCAB), len(prompt))
    device.read(0, prompt, 0)
    news = [unpack(device.play(0, 1, stop, Needs.LEAN), [0])[0]]
    if news[0].lag > device.tolerated(8):
        device.follow(0, news[0].lag)
    while not news[-1].done:
        news.append(unpack(device.play(8, 4, stop, Needs.LEAN), [0])[0])
    accepted, judged = (sum(sum(getattr(new, name)) for new in news) for name in ("accepted", "judged"))
    assert accepted == judged > 20, "the target drafts for itself"
