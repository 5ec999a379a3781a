"""New weights in a running engine: texts are those of the right weights, and nothing is compiled."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.engine import Engine, Request
from jspec.engine.runner import Runner
from support import toys
from support.engines import NEW, OPTIONS, alone, check_texts, made

pytestmark = pytest.mark.usefixtures("quick_compile")
COMPILE = Runner.compile  # tests call this only explicitly
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
    """A request that arrives during the update waits for it, and for nothing else."""
    with Engine(*old, **SMALL) as engine:
        (result,), _ = started(engine, LONG)
        late = []
        asking = threading.Thread(target=lambda: late.extend(engine.generate([LONG])))
        begun = engine._loop._waits_for_running

        def begin_late(update):
            if not asking.ident:
                asking.start()
            return begun(update)

        engine._loop._waits_for_running = begin_late
        engine.update(*new)
        assert result.tokens == text(old[0]) and result.finish_reason == "length"
        asking.join()
        assert late[0].tokens == text(new[0])


@pytest.mark.parametrize("drafts", [True, False])
def test_running_requests_start_again_with_new_weights(old, new, drafts):
    """Statistics and the order of requests start again, too. A waiting request comes after those that ran."""
    drafters = [models[1] if drafts else None for models in (old, new)]
    options = SMALL | ({} if drafts else {"num_draft_tokens": "auto"})
    with Engine(old[0], drafters[0], **options) as engine:
        others = [dataclasses.replace(LONG, key=jax.random.key(i)) for i in range(2)]
        results, ends = started(engine, *others)
        waiting = engine.submit(LONG, lambda _: None).result
        engine.update(new[0], drafters[1], running="restart")
        assert [result.tokens for result in results] != [text(old[0], other) for other in others]
        assert all(end.wait(60) for end in ends)
        while waiting.finish_reason is None:
            pass
    assert [result.tokens for result in [*results, waiting]] == [text(new[0], one) for one in [*others, LONG]]
    for result in results:
        assert len(result.logprobs) == len(result.origins) == NEW and sum(result.accepted) < NEW


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


def test_donated_weights_are_replaced(old):
    """A training step that donates the engine's weights deletes them; the update brings the new ones."""
    step = jax.jit(lambda model: jax.tree.map(lambda leaf: 0.9 * leaf, model), donate_argnums=0)
    target = jax.tree.map(jnp.copy, old[0])
    with Engine(target, old[1], **SMALL) as engine:
        first = engine.generate([LONG])[0].tokens
        trained = step(target)
        with pytest.raises(RuntimeError, match=r"were deleted: .* update\(\) with weights that exist"):
            engine.generate([LONG])
        with pytest.raises(RuntimeError, match="were deleted"):
            engine.update()
        engine.update(trained)
        assert first == text(old[0]) and engine.generate([LONG])[0].tokens == text(trained)


def test_request_interrupted_by_a_failure_finishes_with_old_weights(old, new, monkeypatch):
    """A failed call puts a running request back into the queue. It must not continue its text with the new weights."""
    with Engine(*old, **SMALL) as engine:
        (result,), _ = started(engine, LONG)
        decode, waits = engine.device.decode_rounds, engine._loop._waits_for_running
        failures = [RuntimeError("planted")]

        def decode_rounds(*arguments):
            if failures and engine._loop.update is not None:
                raise failures.pop()
            return decode(*arguments)

        monkeypatch.setattr(engine.device, "decode_rounds", decode_rounds)
        engine.update(*new)
        assert not failures and result.tokens == text(old[0]) and waits is not None
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
    outputs = [jax.device_get(other.replay(device.commands))]
    other = Runner(old[0], jspec.ModelDrafter(old[1]), device.rule, device.sizes, journal=True)
    outputs.append(jax.device_get(other.replay(device.commands)))
    jax.tree.map(np.testing.assert_array_equal, *outputs)
    tokens = [packed for packed in outputs[0]]
    assert len(tokens) > 20


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
            pass
        (result,), _ = started(engine, LONG)
        first = threading.Thread(target=engine.update, args=new)
        first.start()
        while engine._loop.update is None and first.is_alive():
            pass
        if first.is_alive():  # it waits for the long request
            with pytest.raises(RuntimeError, match="Another update of this engine is waiting"):
                engine.update(*new)
        first.join()
        assert result.tokens == text(old[0])
    assert errors and all("A listener cannot update its engine" in error for error in errors)
    with pytest.raises(RuntimeError, match="The engine is closed"):
        engine.update(*old)


def test_closing_engine_finishes_the_update(old, new):
    with Engine(*old, **SMALL) as engine:
        (result,), _ = started(engine, LONG)
        updating = threading.Thread(target=engine.update, args=new)
        updating.start()
    updating.join(60)
    assert not updating.is_alive() and result.tokens == text(old[0])
