"""Updates of an engine's weights beside failed calls, other updates and mistakes."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec.engine import Engine
from support import toys
from support.updates import LONG, SMALL, started, text

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def old():
    target = toys.tiny_llama(0)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def new():
    target = toys.tiny_llama(20)
    return target, toys.tiny_llama(21, 1, related_to=target)


def test_request_interrupted_by_a_failure_finishes_with_old_weights(old, new, monkeypatch):
    """A failed call puts a running request back into the queue. It must not continue its text with the new weights."""
    with Engine(*old, **SMALL) as engine:
        (result,), _ = started(engine, LONG)
        decode = engine.device.decode_rounds
        failures = [RuntimeError("planted")]

        def decode_rounds(*arguments):
            if failures and engine._loop.update is not None:
                raise failures.pop()
            return decode(*arguments)

        monkeypatch.setattr(engine.device, "decode_rounds", decode_rounds)
        engine.update(*new)
        assert not failures and result.tokens == text(old[0])
        assert engine.generate([LONG])[0].tokens == text(new[0])


@pytest.mark.parametrize("running", ["restart", "abort"])
def test_request_interrupted_by_a_failure_does_not_continue_with_new_weights(old, new, monkeypatch, running):
    """After a failed call, a request waits for a slot, but it has already begun."""
    engine = Engine(*old, **SMALL)
    results = engine.stream_sync(LONG)
    next(results)
    with monkeypatch.context() as patch:
        patch.setattr(engine.device, "decode_rounds", lambda *_: 1 / 0)
        engine._loop.turn()
    assert engine.num_waiting == 1
    engine.update(*new, running=running)
    *_, last = results
    if running == "restart":
        assert last.tokens == text(new[0]) and last.restarts == 1
    else:
        assert last.finish_reason == "cancelled" and last.tokens == text(old[0])[: len(last.tokens)]


def update_when_possible(engine, **models):
    """Update the engine as soon as no other update is pending."""
    while True:
        try:
            return engine.update(**models)
        except RuntimeError as error:
            assert "Another update" in str(error)


def test_draft_update_does_not_revert_the_target(old, new):
    """Two threads update target and draft. Neither undoes the other's update, and no stale prefix is reused."""
    with Engine(*old, **SMALL) as engine:
        for i in range(20):
            target = (new, old)[i % 2][0]
            changes = {"target": target}, {"draft": (new, old)[i % 2][1]}
            threads = [threading.Thread(target=update_when_possible, args=(engine,), kwargs=one) for one in changes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert engine.device.target is target and engine.generate([LONG])[0].tokens == text(target)


def test_failed_update_ends_no_request(old, new, monkeypatch):
    """If resetting the slots fails, `update` raises, and the requests start again with the old weights."""
    engine = Engine(*old, **SMALL)
    results = engine.stream_sync(LONG)
    next(results)
    reset, failures = engine.device.reset, [RuntimeError("planted")]

    def failing():
        if failures:
            raise failures.pop()
        reset()

    monkeypatch.setattr(engine.device, "reset", failing)
    with pytest.raises(RuntimeError, match="planted"):
        engine.update(*new, running="restart")
    *_, last = results
    assert last.finish_reason == "length" and last.tokens == text(old[0])


def test_waiting_requests_survive_old_weights_that_were_donated(old, new):
    """The running request fails, because its weights are gone. The waiting one needs only the new weights."""
    target = jax.tree.map(jnp.copy, old[0])
    with Engine(target, **SMALL | {"slots": 1, "num_draft_tokens": "auto"}) as engine:
        decode = engine.device.decode_rounds
        hold, is_held = threading.Event(), threading.Event()

        def held(*arguments):
            is_held.set()
            assert hold.wait(60)
            return decode(*arguments)

        engine.device.decode_rounds = held
        ends = [threading.Event() for _ in range(2)]
        results = [
            engine.submit(LONG, lambda result, end=end: end.set() if result.finish_reason else None).result
            for end in ends
        ]
        assert is_held.wait(60)
        updating = threading.Thread(target=engine.update, args=(new[0],))
        updating.start()
        while engine._loop.update is None:
            time.sleep(0.001)
        for leaf in jax.tree.leaves(target):
            leaf.delete()
        hold.set()
        updating.join(60)
        assert all(end.wait(60) for end in ends)
    assert results[0].finish_reason == "error" and results[1].tokens == text(new[0])


def another(**details):
    return toys.tiny_llama(0, **details)


MISTAKES = {
    "configuration": (
        lambda old: {"target": another(num_layers=3)},
        "new target differs from the engine's in more",
    ),
    "dtype": (
        lambda old: {"target": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), old[0])},
        r"new target has bfloat16\[.*\] on .*, where the engine's programs read float32\[.*\] on .*; pass weights",
    ),
    "quantised": (lambda old: {"draft": jspec.quantize(old[1])}, "new draft differs from the engine's in more"),
    "another drafter": (
        lambda old: {"draft": jspec.NGramDrafter()},
        "new draft differs from the engine's in more",
    ),
    "choice": (lambda old: {"running": "wait"}, "running='wait' is not supported; use \"finish\""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_leave_the_engine_as_it_was(old, mistake):
    change, message = MISTAKES[mistake]
    with Engine(*old, **SMALL) as engine:
        with pytest.raises(ValueError, match=message):
            engine.update(**change(old))
        assert engine.generate([LONG])[0].tokens == text(old[0])


def test_draft_for_an_engine_without_one_is_rejected(old):
    with pytest.raises(ValueError, match="new draft differs from the engine's in more than its weights"):
        Engine(old[0], **SMALL | {"num_draft_tokens": "auto"}).update(draft=old[1])


def test_updates_that_would_wait_forever_are_rejected(old, new):
    errors = []

    def listen(_):
        try:
            engine.update(*new)
        except RuntimeError as error:
            errors.append(str(error))

    with Engine(*old, **SMALL) as engine:
        active = engine.submit(dataclasses.replace(LONG, max_new_tokens=4), listen)
        while active.result.finish_reason is None:
            time.sleep(0.001)
        (result,), _ = started(engine, LONG)
        has_begun, hold = engine._loop._any_request_has_begun, threading.Event()
        engine._loop._any_request_has_begun = lambda: not hold.is_set() or has_begun()
        first = threading.Thread(target=engine.update, args=new)
        first.start()
        while engine._loop.update is None:
            time.sleep(0.001)
        with pytest.raises(RuntimeError, match="Another update of this engine has not finished"):
            engine.update(*new)
        hold.set()
        first.join()
        assert result.tokens == text(old[0])
    assert errors and all("A listener cannot call update()" in error for error in errors)
    with pytest.raises(RuntimeError, match="The engine is closed"):
        engine.update(*old)


def test_closing_engine_finishes_the_update(old, new):
    with Engine(*old, **SMALL) as engine:
        (result,), _ = started(engine, LONG)
        updating = threading.Thread(target=engine.update, args=new)
        updating.start()
        while engine._loop.update is None and updating.is_alive():
            time.sleep(0.001)
    updating.join(60)
    assert not updating.is_alive() and result.tokens == text(old[0]) and engine.device.target is new[0]
