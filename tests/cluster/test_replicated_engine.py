"""Requests on replicas that are lost: the outputs are those of an undisturbed engine."""

import asyncio
import contextlib
import contextvars
import dataclasses
import random
import time

import jax
import numpy as np
import pytest

import jspec
from jspec.cluster.serve import replicated_engine
from jspec.cluster.serve.messages import RequestMessage
from jspec.cluster.serve.replicated_engine import ReplicatedEngine
from jspec.engine import Engine, Request
from support import oracle, toys
from support.engines import NEW, OPTIONS, check_texts, made
from support.law import NUM_TOKENS, VOCAB, exact_law
from support.matrix import PROMPTS, SETTINGS
from support.replicas import UNFINISHED, FlakyReplicas, decode

pytestmark = pytest.mark.usefixtures("quick_compile")


@contextlib.contextmanager
def replicas(fail=lambda call, count: 0, count=2, **options):
    """Yield replicas of a tiny target with different drafts."""
    target = toys.tiny_llama(0, 1)
    drafts = [toys.tiny_llama(1, 1, related_to=target), toys.tiny_llama(2, 1)]
    flaky = FlakyReplicas([(Engine(target, drafts[i % 2], **OPTIONS | options), None) for i in range(count)], fail)
    try:
        yield flaky
    finally:
        flaky.close()


def lost_at_random(seed, share=0.3):
    """Return a failure that loses a share of all calls, each after a random token."""

    def fail(call, count):
        rng = random.Random(f"{seed} {call}")
        if rng.random() < share and count == rng.randrange(4):
            raise ConnectionError("planted")

    return fail


def test_outputs_with_keys_do_not_depend_on_lost_replicas(report):
    requests = made(60)
    with replicas(lost_at_random(0)) as flaky:
        results, engine = decode(flaky, requests)
    check_texts(toys.tiny_llama(0, 1), requests, results)
    report(requests=len(requests), moves=engine.moved["lost"])
    assert engine.moved["lost"] > 10 and not engine._tasks


def test_outputs_without_key_keep_target_distribution_when_replicas_are_lost(report):
    count, target = 2_000, toys.tiny_llama(0, 1)
    settings = list(zip(PROMPTS[:2], SETTINGS, strict=False))
    counts = np.zeros((len(settings), VOCAB**NUM_TOKENS), np.int64)
    kinds = [i for i in range(len(settings)) for _ in range(count)]
    requests = [Request(settings[i][0], NUM_TOKENS, jspec.SamplingParams(**settings[i][1])) for i in kinds]
    options = {"slots": 16, "rounds": 1, "num_draft_tokens": 1, "max_waiting": 8 * count}
    with replicas(lost_at_random(1, 0.5), **options) as flaky:
        results, _ = decode(flaky, requests)
    for i, result in zip(kinds, results, strict=True):
        counts[i, np.ravel_multi_index(result.tokens, (VOCAB,) * NUM_TOKENS)] += 1
    p_values = [oracle.p_value(counts[i], exact_law(target, *of)) for i, of in enumerate(settings)]
    sees = oracle.detectable(count, VOCAB**NUM_TOKENS - 1, oracle.ALPHA / len(settings))
    continued = sum(bool(message.request.generated) for message in flaky.messages)
    report(texts_each=count, continued=continued, min_p=f"{min(p_values):.2g}", sees_tv=f"{sees:.3f}")
    assert continued > count // 10
    assert min(p_values) > oracle.ALPHA / len(settings)


def test_unresponsive_replica_is_left_and_avoided(monkeypatch):
    """Requests leave a replica that hangs, and do not come back to it."""
    monkeypatch.setattr(replicated_engine, "_RESPONSE_TIMEOUT", 3.0)
    requests = made(12)
    with replicas() as flaky:
        hanging = flaky.replicas[0]
        inner = hanging.decode

        async def hangs(message):
            async for delta in inner(message):
                yield delta
                await asyncio.sleep(3600)

        hanging.decode = hangs
        results, engine = decode(flaky, requests)
    check_texts(toys.tiny_llama(0, 1), requests, results)
    assert engine.moved["unresponsive"] == 6 and engine.moved.total() == 6
    assert all(message.avoid == {"r0"} for message in flaky.messages[-6:])


def test_requests_without_a_replica_do_not_wait_for_an_unresponsive_one(monkeypatch):
    """A request that a hanging replica has accepted, but not begun, goes to another when the hang is noticed."""
    monkeypatch.setattr(replicated_engine, "_RESPONSE_TIMEOUT", 3.0)
    requests = made(4)
    with replicas() as flaky:
        inner = flaky.replicas[0].decode

        async def hangs(message):
            if len(flaky.messages) == 1:  # only the first request sees the replica alive
                async for delta in inner(message):
                    yield delta
                    break
            await asyncio.sleep(3600)

        flaky.replicas[0].decode = hangs
        results, _ = decode(flaky, requests)
    check_texts(toys.tiny_llama(0, 1), requests, results)


def test_late_event_loop_is_not_mistaken_for_silent_replicas(monkeypatch):
    """If this process was suspended, replicas get another chance to answer."""
    monkeypatch.setattr(replicated_engine, "_RESPONSE_TIMEOUT", 2.0)
    requests = [dataclasses.replace(request, eos_ids=(), max_new_tokens=NEW) for request in made(4)]

    def fail(call, count):
        if call == 0 and count == 1:
            time.sleep(6)

    with replicas(fail) as flaky:
        results, engine = decode(flaky, requests)
    check_texts(toys.tiny_llama(0, 1), requests, results)
    assert not engine.moved


def test_unexpected_cancellation_is_a_loss():
    """Ray reports some lost calls as cancellations."""
    requests = made(6)

    def fail(call, count):
        if call in (1, 3):
            raise asyncio.CancelledError

    with replicas(fail) as flaky:
        results, engine = decode(flaky, requests)
    check_texts(toys.tiny_llama(0, 1), requests, results)
    assert engine.moved["lost"] + len(requests) <= len(flaky.messages) == len(requests) + 2


def test_constraint_is_never_dropped():
    """A replica that cannot enforce a request's grammar fails it, and does not decode without the grammar."""
    message = RequestMessage(Request((1,), 3), None, ("regular expression", "a"))
    with pytest.raises(RuntimeError, match="cannot constrain outputs"):
        message.to_request(None)


def test_requests_do_not_share_the_context_of_their_http_request():
    """Ray would find the same request id in the context for all choices of an HTTP request."""
    variable, seen = contextvars.ContextVar("variable", default="own"), []

    async def run():
        engine = ReplicatedEngine(spy, flaky.replicas[0].info(), 1)
        variable.set("of the HTTP request")
        await asyncio.to_thread(engine.generate, made(1))

    async def spy(message):
        seen.append(variable.get())
        async for delta in flaky(message):
            yield delta

    with replicas(count=1) as flaky:
        asyncio.run(run())
    assert seen == ["own"]


@pytest.mark.parametrize("reason", ["eos", "length"])
def test_loss_after_the_last_token_ends_the_request(reason):
    """If only the finish reason is lost, no replica gets the request again."""
    [request] = [request for request in made(12) if request.max_new_tokens > 3][:1]
    with replicas(count=1) as flaky:
        [whole], _ = decode(flaky, [request])
        last = whole.tokens[-1:] if reason == "eos" else ()
        request = dataclasses.replace(request, eos_ids=last)
        replica = flaky.replicas[0]
        inner = replica.decode

        async def loses_end(message):
            async for delta in inner(message):
                yield delta._replace(values=delta.values | {"finish_reason": None})
                if delta.values["finish_reason"] is not None:
                    raise ConnectionError("planted")

        replica.decode = loses_end
        [result], _ = decode(flaky, [request])
    assert len(flaky.messages) == 2
    assert (
        result.finish_reason == reason
        and result.tokens == whole.tokens[: whole.tokens.index(last[0]) + 1 if last else None]
    )


@pytest.mark.parametrize("has_slot", [True, False], ids=["in a slot", "before it has a slot"])
def test_request_that_loses_every_replica_ends_with_an_error(has_slot):
    """A request that brings down every replica is given up. Its neighbours are not affected."""
    bad, *others = made(6)
    bad = dataclasses.replace(bad, max_new_tokens=NEW, eos_ids=())
    with replicas() as flaky:
        for replica in flaky.replicas:
            replica.decode = failing_later(replica.decode, bad, has_slot)
        results, engine = decode(flaky, [bad, *others])
    count = 4 if has_slot else 12
    assert results[0].finish_reason == "error" and f"failed {count} times in a row" in results[0].error
    assert engine.moved["lost"] == count
    check_texts(toys.tiny_llama(0, 1), others, results[1:])


def failing_later(inner, bad, has_slot):
    """Return a method like `Replica.decode` that loses `bad` after its first delta, or after it has a slot."""

    async def decode(message):
        async for delta in inner(message):
            is_bad = message.request.tokens == bad.tokens
            if is_bad and not (has_slot and delta.waited is None):
                yield delta._replace(entries={}, waited=0.0 if has_slot else None, values=delta.values | UNFINISHED)
                raise ConnectionError("planted")
            yield delta

    return decode


def test_request_that_the_replica_rejects_ends_with_its_error():
    with replicas(count=1) as flaky:
        [result], engine = decode(flaky, [Request((VOCAB,), 3)])
    assert result.finish_reason == "error" and "outside the vocabulary" in result.error and not engine.moved


def test_failed_request_without_key_continues_on_another_replica():
    """An engine that fails ends its requests without a key; the other replica finishes them."""
    requests = [dataclasses.replace(request, key=None, eos_ids=()) for request in made(6)]
    with replicas() as flaky:
        device = flaky.replicas[0]._engine.device
        decode_rounds, calls = device.decode_rounds, iter(range(10**6))
        device.decode_rounds = lambda *how: 1 / 0 if next(calls) == 1 else decode_rounds(*how)
        results, engine = decode(flaky, requests)
    assert engine.moved["failed"] >= 1
    assert [(result.finish_reason, len(result.tokens)) for result in results] == [
        ("length", request.max_new_tokens) for request in requests
    ]


def test_cancelled_request_leaves_its_replica():
    async def run():
        engine = ReplicatedEngine(flaky, flaky.replicas[0].info(), 1)
        grown = asyncio.Event()
        long = Request((1, 2), NEW, key=jax.random.key(0))
        active = engine.submit(long, lambda _: grown.set())
        await grown.wait()
        engine.cancel(active)
        while engine._tasks or flaky.replicas[0]._engine.running_requests:
            await asyncio.sleep(0.01)
        return active

    with replicas(lambda call, count: 0.2, count=1, rounds=1) as flaky:
        active = asyncio.run(run())
    assert active.result.finish_reason == "cancelled" and len(active.result.tokens) < NEW


def test_prompt_scores_and_top_tokens_survive_a_loss():
    """Log-probabilities of the prompt are computed once, and every token keeps its alternatives."""
    request = Request((1, 2, 3, 4), NEW, key=jax.random.key(7), top_logprobs=3, prompt_logprobs=True)
    with replicas(lambda call, count: 1 / 0 if call == 0 and count == 2 else 0, rounds=1) as flaky:
        [result], engine = decode(flaky, [request])
        [whole] = flaky.replicas[0]._engine.generate([request])
    assert engine.moved and len(flaky.messages) == 2 and not flaky.messages[1].request.prompt_logprobs
    assert result.tokens == whole.tokens and len(result.prompt_logprobs) == len(whole.prompt_logprobs) == 4
    assert len(result.origins) == len(result.logprobs) == len(result.top_logprobs) == NEW
    np.testing.assert_allclose(result.raw_logprobs, whole.raw_logprobs, atol=2e-5)
    assert [[i for i, _ in top] for top in result.top_logprobs] == [[i for i, _ in top] for top in whole.top_logprobs]


def test_constraint_that_cannot_be_sent_is_rejected():
    async def run():
        engine = ReplicatedEngine(flaky, flaky.replicas[0].info(), 1)
        with pytest.raises(TypeError, match="constraint is of type function"):
            engine.submit(Request((1,), 3, constraint=lambda: None), print)

    with replicas(count=1) as flaky:
        asyncio.run(run())


def test_failing_listener_cancels_only_its_request():
    async def run():
        engine = ReplicatedEngine(flaky, flaky.replicas[0].info(), 1)
        bad = engine.submit(requests[0], lambda _: 1 / 0)
        good = await asyncio.to_thread(engine.generate, requests[1:])
        while engine._tasks or flaky.replicas[0]._engine.running_requests:
            await asyncio.sleep(0.01)
        return bad.result, good

    requests = made(3)
    with replicas(count=1) as flaky:
        bad, good = asyncio.run(run())
    assert bad.finish_reason == "cancelled"
    check_texts(toys.tiny_llama(0, 1), requests[1:], good)


def test_health_check_reports_an_engine_without_progress(monkeypatch):
    with replicas(count=1) as flaky:
        replica = flaky.replicas[0]
        replica.check_health()
        monkeypatch.setattr(replica._engine, "trouble", lambda: "The engine's thread has ended.")
        with pytest.raises(RuntimeError, match=r"The engine's thread has ended\."):
            replica.check_health()


def test_server_says_when_no_replica_answers(monkeypatch):
    async def nobody(message):
        await asyncio.sleep(3600)
        yield None

    async def run():
        engine = ReplicatedEngine(nobody, flaky.replicas[0].info(), 1)
        assert not engine.trouble()
        active = engine.submit(made(1)[0], print)
        await asyncio.sleep(0.1)
        assert engine.num_waiting == 1 and not engine.running_requests
        monkeypatch.setattr(replicated_engine, "_STALL_SECONDS", 0.05)
        assert engine.trouble().startswith("No replica has answered for")
        engine.cancel(active)
        await asyncio.sleep(0.1)
        assert not engine.trouble() and active.result.finish_reason == "cancelled"

    with replicas(count=1) as flaky:
        asyncio.run(run())


def test_moved_request_is_sent_before_waiting_ones(monkeypatch):
    monkeypatch.setattr(ReplicatedEngine, "_capacity", lambda self: 2)
    requests = [Request((i, 3), NEW, key=jax.random.key(i)) for i in range(6)]

    def fail(call, count):
        if call == 0 and count == 3:
            raise ConnectionError("planted")

    with replicas(fail) as flaky:
        results, engine = decode(flaky, requests)
    check_texts(toys.tiny_llama(0, 1), requests, results)
    [moved] = [i for i, message in enumerate(flaky.messages) if message.request.generated]
    assert engine.moved["lost"] == 1 and moved < 4
