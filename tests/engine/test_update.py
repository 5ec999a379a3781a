"""New weights in a running engine: each text comes from one set of weights, and nothing is compiled."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec.engine import Engine
from jspec.engine.runner import Runner
from jspec.engine.slot_output import unpack
from support import toys
from support.constrained import NoMultiples
from support.engines import NEW, OPTIONS, check_texts, made
from support.updates import LONG, SMALL, started, text

pytestmark = pytest.mark.usefixtures("quick_compile")
COMPILE = Runner.compile  # the fixture below replaces it


@pytest.fixture(scope="module")
def old():
    target = toys.tiny_llama(0)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def new():
    target = toys.tiny_llama(20)
    return target, toys.tiny_llama(21, 1, related_to=target)


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
