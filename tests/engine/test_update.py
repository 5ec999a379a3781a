"""New weights in a running engine: each text comes from one set of weights, and nothing is compiled."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.engine import Engine, Request
from jspec.engine.runner import Runner
from jspec.engine.slot_output import unpack
from support import toys
from support.constrained import NoMultiples
from support.engines import NEW, OPTIONS, alone, check_texts, made

pytestmark = pytest.mark.usefixtures("quick_compile")
COMPILE = Runner.compile  # the fixture below replaces it
LONG = Request((1, 2, 3), NEW, jspec.SamplingParams(temperature=0.7), jax.random.key(5))
SMALL = {"slots": 2, "max_length": 64, "num_draft_tokens": 2, "chunks": (8,), "rounds": 1}


@pytest.fixture(scope="module")
def old():
    target = toys.tiny_llama(0)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def new():
    target = toys.tiny_llama(20)
    return target, toys.tiny_llama(21, 1, related_to=target)


def text(target, request=LONG):
    return list(alone(target, [request])[0][0])


def started(engine, *requests):
    """Submit requests and wait until each of them has output. Return their results and an event for the end of each."""
    results, ends = [], []
    for request in requests:
        has_output, has_ended = threading.Event(), threading.Event()

        def listen(result, has_output=has_output, has_ended=has_ended):
            has_output.set()
            if result.finish_reason:
                has_ended.set()

        results.append(engine.submit(request, listen).result)
        ends.append(has_ended)
        assert has_output.wait(60)
    return results, ends


def test_update_gives_texts_of_new_weights_without_compiling(old, new, compilations):
    """No prefix that was prefilled with the old weights is reused, and no program is compiled."""
    requests = made(12, seed=1)
    with Engine(*old, **OPTIONS, num_draft_tokens=2) as engine:
        COMPILE(engine.device)
        check_texts(old[0], requests, engine.generate(requests))
        last = requests[-2:]
        assert any(result.cached for result in engine.generate(last))
        count, before = len(engine.device._programs), compilations()
        engine.update(*new)
        results = engine.generate(last)
        assert [result.cached for result in results] == [0, 0]
        results = engine.generate(requests[:-2]) + results
        assert compilations() == before and len(engine.device._programs) == count
        check_texts(new[0], requests, results)
        engine.update(*old)
        check_texts(old[0], requests, engine.generate(requests))


def test_running_requests_finish_with_old_weights(old, new):
    """A request that arrives during the update waits only for the update."""
    with Engine(*old, **SMALL) as engine:
        (result,), _ = started(engine, LONG)
        late = []
        asking = threading.Thread(target=lambda: late.extend(engine.generate([LONG])))
        has_begun = engine._loop._any_request_has_begun

        def ask_late():
            if not asking.ident:
                asking.start()
            return has_begun()

        engine._loop._any_request_has_begun = ask_late
        engine.update(*new)
        assert result.tokens == text(old[0]) and result.finish_reason == "length"
        asking.join()
        assert late[0].tokens == text(new[0])


def alone_again(target, requests, results):
    """Check that results are those of a new engine, except for what depends on timing."""
    with Engine(target, **SMALL | {"num_draft_tokens": "auto"}) as engine:
        expected = engine.generate(requests)
    for result, other in zip(results, expected, strict=True):
        assert result.finish_reason == other.finish_reason == "length"
        for field in ("tokens", "origins", "accepted", "judged", "drafted"):
            assert getattr(result, field) == getattr(other, field), field
        for field in ("logprobs", "raw_logprobs", "prompt_logprobs"):
            np.testing.assert_allclose(getattr(result, field), getattr(other, field), atol=1e-5)
        assert [[i for i, _ in top] for top in result.top_logprobs] == [
            [i for i, _ in top] for top in other.top_logprobs
        ]
        assert len(result.prompt_top_logprobs) == len(other.prompt_top_logprobs)


def test_running_requests_start_again_with_new_weights(old, new):
    """Restarted requests keep their order, ahead of waiting ones. Their results hold nothing of the old weights."""
    changes = {"top_logprobs": 2, "prompt_logprobs": True}, {"sampling": jspec.SamplingParams(presence_penalty=0.5)}
    with Engine(old[0], **SMALL | {"num_draft_tokens": "auto"}) as engine:
        others = [dataclasses.replace(LONG, key=jax.random.key(i), **changes[i]) for i in range(2)]
        results, ends = started(engine, *others)
        before = [list(result.tokens) for result in results]
        last = threading.Event()
        waiting = engine.submit(LONG, lambda result: last.set() if result.finish_reason else None).result
        engine.update(new[0], running="restart")
        assert all(end.wait(60) for end in ends) and last.wait(60)
    assert all(before) and [result.restarts for result in [*results, waiting]] == [1, 1, 0]
    alone_again(new[0], [*others, LONG], [*results, waiting])


def test_constrained_request_starts_again(old, new):
    request = dataclasses.replace(LONG, constraint=NoMultiples)
    with Engine(*old, **SMALL) as engine:
        (result,), (end,) = started(engine, request)
        engine.update(*new, running="restart")
        assert end.wait(60) and result.restarts == 1
        assert result.tokens == engine.generate([request])[0].tokens
    with Engine(*new, **SMALL) as engine:
        assert result.tokens == engine.generate([request])[0].tokens


def test_cancelled_request_keeps_its_output(old, new):
    engine = Engine(*old, **SMALL)
    results = engine.stream_sync(LONG)
    count = len(next(results).tokens)
    engine.cancel(engine.running_requests[0])
    engine.update(*new, running="restart")
    *_, last = results
    assert last.finish_reason == "cancelled" and len(last.tokens) >= count and last.restarts == 0


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


def test_running_requests_are_aborted(old, new):
    with Engine(*old, **SMALL) as engine:
        (result,), (end,) = started(engine, LONG)
        engine.update(*new, running="abort")
        assert end.wait(60) and result.finish_reason == "cancelled"
        assert result.tokens == text(old[0])[: len(result.tokens)] and len(result.tokens) < NEW
        assert engine.generate([LONG])[0].tokens == text(new[0])


def test_new_draft_leaves_running_requests_and_prefixes_alone(old):
    """The better draft is used at once. The text is the same, because the request has a key."""
    target, draft = old
    with Engine(target, draft, **SMALL) as engine:
        (result,), (end,) = started(engine, LONG)
        count = len(result.tokens)
        engine.update(draft=draft)
        engine.update(draft=jax.tree.map(lambda leaf: -leaf, draft))
        assert end.wait(60) and result.tokens == text(target) and count < NEW
        again = engine.generate([dataclasses.replace(LONG, tokens=(*LONG.tokens, *result.tokens), max_new_tokens=9)])
        assert again[0].cached > 15


def test_equal_copies_of_the_target_are_no_new_weights(old):
    """`flax.nnx.jit` leaves copies in a model. A later update of the draft does not restart running requests."""
    target = jax.tree.map(jnp.copy, old[0])
    with Engine(target, old[1], **SMALL) as engine:
        (result,), (end,) = started(engine, LONG)
        nnx.jit(lambda model: None)(target)
        engine.update(draft=old[1], running="abort")
        assert end.wait(60) and result.tokens == text(old[0])


def test_better_draft_is_used(old):
    target = old[0]
    worse, better = toys.tiny_llama(50), toys.tiny_llama(51, related_to=target, closeness=1)
    with Engine(target, worse, **SMALL) as engine:
        rates = [engine.generate([LONG])[0].acceptance_rate]
        engine.update(draft=better)
        rates.append(engine.generate([LONG])[0].acceptance_rate)
    assert rates[0] < 0.5 and rates[1] > 0.9


def test_weights_changed_in_place_are_read(old, new):
    target, draft = (jax.tree.map(jnp.copy, model) for model in old)
    with Engine(target, draft, **SMALL) as engine:
        (result,), _ = started(engine, LONG)
        nnx.update(target, nnx.state(new[0]))
        with pytest.raises(RuntimeError, match=r"call the engine's update\(\) to use the current weights"):
            engine.generate([LONG])
        engine.update()
        assert result.tokens == text(old[0])
        assert engine.generate([LONG])[0].tokens == text(new[0])


def test_donated_weights_are_replaced(old, compilations):
    """A training step that donates the engine's weights deletes them; `update` supplies new ones."""
    step = jax.jit(lambda model: jax.tree.map(lambda leaf: 0.9 * leaf, model), donate_argnums=0)
    target = jax.tree.map(jnp.copy, old[0])
    with Engine(target, old[1], **SMALL) as engine:
        first = engine.generate([LONG])[0].tokens
        trained = step(target)
        with pytest.raises(RuntimeError, match=r"were deleted: .* pass models whose arrays still exist"):
            engine.generate([LONG])
        with pytest.raises(RuntimeError, match="were deleted"):
            engine.update()
        leaves, before = jax.tree.leaves(trained), compilations()
        engine.update(trained)
        assert all(weight is leaf for weight, leaf in zip(engine.device._weights, leaves, strict=False))
        assert compilations() == before
        assert first == text(old[0]) and engine.generate([LONG])[0].tokens == text(trained)


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


@pytest.mark.parametrize("running", ["finish", "restart", "abort"])
def test_engine_without_thread_is_updated(old, new, running):
    engine = Engine(*old, **SMALL)
    results = engine.stream_sync(LONG)
    next(results)
    engine.update(*new, running=running)
    *_, last = results
    expected = {"finish": text(old[0]), "restart": text(new[0]), "abort": text(old[0])[: len(last.tokens)]}
    assert last.tokens == expected[running]
    *_, last = engine.stream_sync(LONG)
    assert last.tokens == text(new[0])


def test_journal_replays_updates(old, new):
    with Engine(*old, **SMALL, journal=True) as engine:
        engine.generate([LONG])
        engine.update(*new)
        engine.generate([LONG])
        device = engine.device
    other = Runner(old[0], jspec.ModelDrafter(old[1]), device.rule, device.sizes, journal=True)
    slots = range(SMALL["slots"])
    outputs = [unpack(packed, slots, 0, slots) for packed in other.replay(device.commands)]
    tokens = [token for output in outputs for slot in slots for token in output[slot].tokens]
    assert tokens == text(old[0]) + text(new[0])


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
