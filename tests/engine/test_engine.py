"""The engine: a seeded request gives the same output as on its own, and no request receives another's tokens."""

import asyncio
import dataclasses
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import jspec
from jspec.engine import Engine, Request
from jspec.engine.runner import Runner
from jspec.engine.slot_output import unpack
from support import toys
from support.engines import LONGEST, NEW, OPTIONS, alone, check_texts, made
from support.law import VOCAB, plain

pytestmark = pytest.mark.usefixtures("quick_compile")
COMPILE = Runner.compile  # tests call this only explicitly


@pytest.fixture(scope="module")
def models():
    target = toys.tiny_llama(0)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def shallow():
    """Return models of one layer, for tests that need programs of their own."""
    target = toys.tiny_llama(0, 1)
    return target, toys.tiny_llama(1, 1, related_to=target)


@pytest.fixture(scope="module")
def engine(models):
    """Yield one journaling engine for all tests that leave its state usable by others."""
    with Engine(*models, **OPTIONS, journal=True) as engine:
        yield engine


def test_engine_texts_equal_single_request_texts(engine, models):
    requests = made(40)
    check_texts(models[0], requests, engine.generate(requests))


def test_cached_prefix_is_not_prefilled_again(engine, models):
    first = made(6, seed=1)
    first = [dataclasses.replace(one, max_new_tokens=4, eos_ids=()) for one in first]
    texts = [one.tokens + tuple(found.tokens) for one, found in zip(first, engine.generate(first), strict=True)]
    again = [Request(text, 8, one.sampling, one.key) for text, one in zip(texts[3:], first[3:], strict=True)]
    warm = engine.generate(again)
    check_texts(models[0], again, warm)
    assert sum(found.cached for found in warm) > sum(len(text) for text in texts[3:]) // 2
    others = engine.generate([dataclasses.replace(one, salt="another's") for one in again])
    assert [found.tokens for found in others] == [found.tokens for found in warm]
    assert not any(found.cached for found in others)


def test_concurrent_requests_and_cancellations_keep_texts_correct(engine, models):
    """Submit requests from several threads and cancel some of them midway."""
    requests, found = made(24, seed=2), {}

    def ask(number):
        for i in range(number, len(requests), 6):
            arrived = threading.Event()
            cancel = i % 5 == 3
            active = engine.submit(requests[i], lambda _, arrived=arrived: arrived.set())
            while active.result.finish_reason is None:
                arrived.wait(60)
                arrived.clear()
                if cancel:
                    engine.cancel(active)
            found[i] = active.result

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = [i for i, result in found.items() if result.finish_reason != "cancelled"]
    assert len(whole) >= 19
    check_texts(models[0], [requests[i] for i in whole], [found[i] for i in whole])
    for i in set(found) - set(whole):
        text = alone(models[0], requests[i : i + 1])[0][0]
        assert found[i].tokens == text[: len(found[i].tokens)]


def test_journal_replay_reproduces_run(engine, models):
    """Replaying a journal on another runner reproduces the run bit for bit."""
    engine.generate([*made(8, seed=12), *made(4, seed=13, seeded=False)])
    commands = list(engine.device.commands)
    one, other = (
        Runner(models[0], engine.device.drafter, engine.device.rule, engine.device.sizes, journal=True)
        for _ in range(2)
    )
    first, second = one.replay(commands), other.replay(commands)
    slots, tokens = range(OPTIONS["slots"]), 0
    calls = [of for name, of in commands if name == "decode_rounds"]
    assert {any(of[4]) for of in calls} == {True, False}  # a call stops for a finished slot while a request waits
    tops = [engine.device.sizes.top_logprobs if of[3] else 0 for of in calls]
    for a, b, num_top in zip(first, second, tops, strict=True):
        outputs = unpack(a, slots, num_top, slots)
        assert outputs == unpack(b, slots, num_top, slots)
        tokens += sum(len(output.tokens) for output in outputs.values())
    assert tokens > 100


def test_different_requests_do_not_recompile(shallow, compilations):
    with Engine(*shallow, **OPTIONS | {"slots": 2, "chunks": (16,)}, num_draft_tokens=2) as engine:
        engine.generate(made(14, seed=3) + made(2, seed=3, seeded=False))
        COMPILE(engine.device)
        requests = [*made(21, seed=4), *made(7, seed=5, seeded=False)]
        before = compilations()
        engine.generate(requests)
        assert compilations() == before


def test_failed_call_is_recovered(models, monkeypatch):
    """After a failed call, seeded requests continue unchanged; the others end with an error."""
    requests = made(6, seed=6)
    requests[2] = dataclasses.replace(requests[2], key=None)
    with Engine(*models, **OPTIONS) as engine:
        decode_rounds, calls = engine.device.decode_rounds, []

        def fails(*arguments):
            calls.append(arguments)
            if len(calls) in (3, 7):
                raise RuntimeError("the device is gone")
            return decode_rounds(*arguments)

        monkeypatch.setattr(engine.device, "decode_rounds", fails)
        results = engine.generate(requests)
    assert results[2].finish_reason == "error" and "the device is gone" in results[2].error
    kept = [i for i in range(6) if i != 2]
    check_texts(models[0], [requests[i] for i in kept], [results[i] for i in kept])


def test_permanent_failure_ends_all_requests(models, monkeypatch):
    with Engine(*models, **OPTIONS) as engine:
        monkeypatch.setattr(engine.device, "decode_rounds", lambda *_: 1 / 0)
        results = engine.generate(made(5, seed=7))
        assert [(found.finish_reason, found.error) for found in results] == [("error", results[0].error)] * 5
        monkeypatch.undo()
        assert engine.generate(made(1, seed=8))[0].finish_reason in ("eos", "length")


def test_drafter_with_invalid_ids_is_named(shallow):
    class Beyond(jspec.NGramDrafter):
        def propose(self, state, context, num_draft_tokens):
            draft, state = super().propose(state, context, num_draft_tokens)
            return dataclasses.replace(draft, tokens=draft.tokens + VOCAB, probs=jnp.ones_like(draft.probs)), state

    fields = ["max_ngram", "min_ngram", "tree"]
    drafter = jax.tree_util.register_dataclass(Beyond, data_fields=[], meta_fields=fields)()
    with Engine(shallow[0], drafter, **OPTIONS, num_draft_tokens=2) as engine:
        result = engine.generate([Request((1, 2, 3), NEW)])[0]
    assert result.finish_reason == "error" and "Beyond drafted ids outside" in result.error


def test_lossy_rule_reports_distortion(shallow):
    with Engine(*shallow, **OPTIONS | {"slots": 2}, num_draft_tokens=2, accept=jspec.Lenient(0.5)) as engine:
        free, keyed = engine.generate([Request((1, 2, 3), NEW), Request((1, 2, 3), NEW, key=jax.random.key(0))])
    assert free.distortion > 0 and keyed.distortion == 0


def check_top_logprobs(logits, tokens, logprobs, tops, count):
    """Check the log-probabilities reported for `tokens`, which were sampled from ``logits[N, V]``."""
    raw = scipy.special.log_softmax(logits, axis=-1)
    np.testing.assert_allclose(logprobs, raw[np.arange(len(tokens)), tokens], atol=1e-5)
    assert [len(one) for one in tops] == [count] * len(tokens)
    if count:
        ids, values = np.moveaxis(np.array(tops), 2, 0)
        np.testing.assert_allclose(values, -np.sort(-raw, axis=1)[:, :count], atol=1e-5)
        np.testing.assert_allclose(values, np.take_along_axis(raw, ids.astype(int), axis=1), atol=1e-5)
        for token, logprob, one in zip(tokens, logprobs, tops, strict=True):
            assert dict(one).get(token, logprob) == logprob  # bitwise: clients recognise greedy tokens by it


def test_top_logprobs_and_prompt_logprobs_are_raw(engine, models):
    """Log-probabilities are raw for any sampling parameters and neighbours, whether or not the prefix is cached."""
    first = made(10, seed=20)
    counts = [i % 4 * 2 for i in range(10)]
    requests = [
        dataclasses.replace(one, top_logprobs=n, prompt_logprobs=i % 3 != 1, eos_ids=())
        for i, (one, n) in enumerate(zip(first, counts, strict=True))
    ]
    engine.generate([dataclasses.replace(one, key=None) for one in first[:4]])
    results = engine.generate(requests)
    check_texts(models[0], requests, results)
    for request, result, n in zip(requests, results, counts, strict=True):
        text = np.zeros((1, LONGEST + NEW), np.int32)
        text[0, : len(request.tokens) + len(result.tokens)] = (*request.tokens, *result.tokens)
        logits, size = np.asarray(plain(models[0], text))[0], len(request.tokens)
        tops = result.top_logprobs or [[]] * len(result.tokens)
        check_top_logprobs(logits[size - 1 :][: len(result.tokens)], result.tokens, result.raw_logprobs, tops, n)
        if request.prompt_logprobs:
            assert np.isnan(result.prompt_logprobs[0]) and result.prompt_top_logprobs[0] == [] and not result.cached
            check_top_logprobs(
                logits[: size - 1], request.tokens[1:], result.prompt_logprobs[1:], result.prompt_top_logprobs[1:], n
            )
        else:
            assert result.prompt_logprobs == []


def test_streams_grow_and_end(engine, models):
    requests = made(5, seed=9)

    async def read(request):
        sizes = [len(result.tokens) async for result in engine.stream(request)]
        return sizes

    async def all_of_them():
        return await asyncio.gather(*map(read, requests))

    for request, sizes, (tokens, _) in zip(
        requests, asyncio.run(all_of_them()), alone(models[0], requests), strict=True
    ):
        assert sizes == sorted(sizes) and sizes[-1] == len(tokens), request


def test_failing_callback_does_not_affect_other_requests(engine, models):
    def fails(result):
        raise KeyError("planted")

    active = engine.submit(Request((1, 2), NEW, key=jax.random.key(0)), fails)
    requests = made(4, seed=14)
    check_texts(models[0], requests, engine.generate(requests))
    assert active.result.finish_reason in ("cancelled", "length")


def test_error_in_engine_context_cancels_requests(models):
    with pytest.raises(KeyError), Engine(*models, **OPTIONS) as engine:
        active_requests = [engine.submit(Request((1, 2), NEW), print) for _ in range(9)]
        raise KeyError("planted")
    assert {active.result.finish_reason for active in active_requests} <= {"cancelled", "length"}
    assert "cancelled" in {active.result.finish_reason for active in active_requests}


def test_abandoned_stream_frees_its_slot(engine):
    async def leave():
        async for result in engine.stream(Request((1, 2, 3), NEW, key=jax.random.key(0))):
            return result

    results = [asyncio.run(leave()) for _ in range(4)]
    assert engine.generate(made(4, seed=10))
    assert {result.finish_reason for result in results} <= {"cancelled", "length"}


def test_bad_requests_are_rejected_at_once(engine):
    for request, message in (
        (Request((), 3), "nothing to continue"),
        (Request((VOCAB,), 3), "outside the vocabulary"),
        (Request((1,), 0), "max_new_tokens"),
        (Request((1,) * LONGEST, NEW + 1), "use a larger max_length"),
        (Request((1,), 3, jspec.SamplingParams(temperature=-1)), "temperature must be"),
        (Request((1,), 3, eos_ids=(0,) * 9), "at most 8"),
        (Request((1,), 3, eos_ids=(VOCAB,)), "eos_ids holds"),
        (Request((1,), 3, top_logprobs=VOCAB + 1), "top_logprobs must be between 0 and 8"),
        (Request((1,), 3, jspec.SamplingParams(min_tokens=np.array([2]))), "for one request"),
        (Request((1,), 3, jspec.SamplingParams(temperature=np.array([0.7]))), "for one request"),
        (Request((1,), 3, jspec.SamplingParams(max_tokens=2)), "limit a request with max_new_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request, print)
    with pytest.raises(TypeError, match="expected an int"):
        engine.submit(Request((1,), 3, top_logprobs=2.0), print)
    with pytest.raises(TypeError, match="typed PRNG keys"):
        engine.submit(Request((1,), 3, key=jax.random.PRNGKey(0)), print)


def test_full_queue_and_closed_engine_reject_requests(models, monkeypatch):
    held = threading.Event()
    with Engine(*models, **OPTIONS, max_waiting=2) as engine:
        turn = engine._loop.turn
        monkeypatch.setattr(engine._loop, "turn", lambda: held.wait() and turn())
        active_requests = []
        with pytest.raises(queue.Full, match="2 requests are waiting"):
            while True:
                active_requests.append(engine.submit(Request((1,), 3), print))
        held.set()
    assert len(active_requests) >= 2 and {active.result.finish_reason for active in active_requests} == {"length"}
    for stopped in (engine, Engine(*models, **OPTIONS)):
        with pytest.raises(RuntimeError, match="not running"):
            stopped.submit(Request((1,), 3), print)


def test_invalid_engine_options_are_rejected(models):
    target, draft = models

    for options, message in (
        ({"chunks": ()}, "chunks must be"),
        ({"chunks": (0, 4)}, "chunks must be"),
        ({"slots": 0}, "slots must be"),
        ({"num_draft_tokens": jspec.UpTo(4)}, "pass an int"),
        ({"num_draft_tokens": "all"}, "pass an int"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be"),
        ({"accept": "owl"}, "not an acceptance rule"),
        ({"max_length": 10**6}, "positions that the models support"),
        ({"max_length": 0}, "max_length must be"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Engine(target, draft, **(OPTIONS | options))
    with pytest.raises(ValueError, match="vocabulary"):
        Engine(target, toys.tiny_llama(1, 1, vocab_size=VOCAB + 1), **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4, 8])
def test_1000_engine_texts_equal_single_request_texts(models, slots):
    requests = made(1000, seed=11)
    with Engine(*models, **(OPTIONS | {"slots": slots})) as engine:
        check_texts(models[0], requests, engine.generate(requests))
