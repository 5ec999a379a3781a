"""An engine under unexpected failures: unaffected requests do not notice, and no request waits forever."""

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
from jspec.engine.runner import Runner
from jspec.engine.slot_output import unpack
from jspec.engine.slots import Sizes, Variant
from support import engines, toys
from support.engines import NEW, check_texts, made
from support.fake_runner import KEY, FakeRunner, make_active
from support.law import VOCAB

pytestmark = pytest.mark.usefixtures("quick_compile")
# One chunk size and one draft length, because how either is chosen matters to none of these tests.
OPTIONS = engines.OPTIONS | {"slots": 3, "chunks": (16,), "num_draft_tokens": 2}


class Panic(BaseException):
    """The kind of exception that extension modules raise when they fail."""


class Anything:
    """A constraint that forbids one token and can be made slow or failing."""

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
    target = toys.tiny_llama(0, 1)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.mark.parametrize(
    "drafter",
    [
        lambda target: target,
        lambda target: jspec.TreeDrafter(target, jspec.Tree((0, 0))),
        lambda target: jspec.FallbackDrafter(jspec.NGramDrafter(), target),
    ],
)
def test_engine_without_thread_drafts(models, drafter):
    """An engine without a thread drafts even if it must first measure the cost of rounds, call by call."""
    engine = Engine(models[0], drafter(models[0]), slots=1, max_length=200)
    (*_, result) = engine.stream_sync(Request((1, 2), 190, key=jax.random.key(0)))
    assert sum(result.drafted) and len(result.tokens) == 190
    budget = engine._loop.round_budget
    kinds = {kind[0] for kind in budget.costs}
    assert len(kinds) == 2 and all(map(budget.is_measured, budget.costs)), "few are compiled"
    assert max(budget.costs.values()) < 1, "nothing of what compiling took"


@pytest.mark.parametrize("error", [KeyError("planted"), asyncio.CancelledError(), Panic("planted")])
def test_callback_or_constraint_error_ends_only_its_request(models, error):
    """An error raised by a listener, a constraint factory or a constraint ends only that request."""

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


def test_failed_turn_does_not_end_thread(models, monkeypatch):
    with Engine(*models, **OPTIONS) as engine:
        turn, fails = engine._loop.turn, [Panic("planted")] * 2

        def failing():
            if fails:
                raise fails.pop()
            turn()

        monkeypatch.setattr(engine._loop, "turn", failing)
        requests = made(3, seed=5)
        check_texts(models[0], requests, engine.generate(requests))


def test_cancellation_is_not_undone_by_second_close(models):
    """Closing the engine a second time, as its `with` block does, does not undo a cancellation."""
    with Engine(*models, **OPTIONS) as engine:
        active_requests = [engine.submit(Request((1, 2), NEW), print) for _ in range(9)]
        engine._closing = engine._loop.cancel_all = True
        engine.close()
    assert "cancelled" in {active.result.finish_reason for active in active_requests}


def test_interrupted_generate_cancels_its_requests(models, monkeypatch):
    class Interrupted(queue.SimpleQueue):
        def get(self):
            raise KeyboardInterrupt

    with Engine(*models, **OPTIONS) as engine:
        monkeypatch.setattr("jspec.engine.engine.queue.SimpleQueue", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([Request((1, 2), NEW)] * 3)
        monkeypatch.undo()
        end = time.monotonic() + 60
        while engine.running_requests or engine.num_waiting:
            assert time.monotonic() < end


def test_failure_between_rows_keeps_draft_statistics_aligned(monkeypatch):
    """Draft lengths and accepted counts stay in step; otherwise no draft length could be chosen again."""
    loop, deliver, fails = Loop(FakeRunner(), 8, 1.0), Loop._deliver, [1]

    def failing(self, slot, active, output, *rest):
        if fails and len(active.result.tokens) > 4:
            raise KeyError(fails.pop())
        return deliver(self, slot, active, output, *rest)

    monkeypatch.setattr(Loop, "_deliver", failing)
    active_requests = [make_active(Request((i, 7, 7), 50, key=KEY), print) for i in (1, 2, 3)]
    for active in active_requests:
        loop.submit(active)
    while loop.is_busy:
        loop.turn()
        assert all(len(active.draft_lengths) == len(active.result.accepted) for active in active_requests)
    assert {active.result.finish_reason for active in active_requests} == {"length"} and not fails


def test_journal_replay_with_constraints_reproduces_run(models):
    """A replay need not wait: every constraint has been asked for its mask before it is released."""
    with Engine(*models, **OPTIONS, journal=True) as engine:
        slow = [dataclasses.replace(one, constraint=lambda: Anything(seconds=0.003)) for one in made(5, seed=2)]
        engine.generate([*slow, *made(3, seed=3)])
    commands, sizes = list(engine.device.commands), engine.device.sizes
    one, other = (Runner(models[0], engine.device.drafter, engine.device.rule, sizes) for _ in range(2))
    steps = itertools.chain.from_iterable((other.replay([command]), other.wait())[0] for command in commands)
    tops = [sizes.top_logprobs if of[3] else 0 for name, of in commands if name == "decode_rounds"]
    slots = range(OPTIONS["slots"])
    assert any(name == "release" for name, _ in commands)
    for a, b, num_top in zip(one.replay(commands), [*steps], tops, strict=True):
        assert unpack(a, slots, num_top, slots) == unpack(b, slots, num_top, slots)


def test_constraint_without_cpu_backend_is_rejected(models, monkeypatch):
    monkeypatch.setattr("jspec.engine.validate_request._has_cpu", lambda: False)
    with Engine(*models, **OPTIONS) as engine, pytest.raises(ValueError, match="add cpu to JAX_PLATFORMS"):
        engine.generate([Request((1, VOCAB - 1), NEW, constraint=Anything)])


@pytest.mark.parametrize(
    "drafter",
    [
        lambda target: jspec.MixtureDrafter(target, target, 0.5),
        lambda target: jspec.CascadeDrafter(target, jspec.NGramDrafter()),
    ],
)
def test_combined_drafter_catches_up_before_drafting(models, drafter):
    """Tokens decoded without drafts are read before drafting; tokens skipped here would stay missing for good."""
    target, sizes = models[0], Sizes(1, 64, 1, (8,), (0, 8), 4)
    runner = Runner(target, drafter(target), RULES["rejection"], sizes)
    prompt, stop = tuple(np.random.default_rng(0).integers(VOCAB, size=7).tolist()), np.zeros(1, bool)
    request = Request(prompt, 40, key=KEY)
    runner.assign_slot(0, request.row(1, VOCAB), len(prompt))
    runner.prefill(0, prompt, 0)
    outputs = [unpack(runner.decode_rounds(0, 1, stop, Variant.TEMPERATURE_ONLY), [0])[0]]
    if outputs[0].num_unread > runner.max_unread(8, Variant.TEMPERATURE_ONLY):
        runner.catch_up_drafter(0, outputs[0].num_unread)
    while not outputs[-1].done:
        outputs.append(unpack(runner.decode_rounds(8, 4, stop, Variant.TEMPERATURE_ONLY), [0])[0])
    accepted, judged = (sum(sum(getattr(output, name)) for output in outputs) for name in ("accepted", "judged"))
    assert accepted == judged > 20, "the target drafts for itself"
