"""`jspec.stream` yields parts of an output as they are decoded; together they equal the output of plain decoding."""

import gc
import itertools
import weakref

import jax
import numpy as np
import pytest

import jspec
from jspec.engine import Engine, Request
from jspec.engine.runner import Runner
from support import text_pair
from support.templates import TEMPLATE

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPT = "in a thing"
KINDS = {
    "plain": {},
    "greedy": {"sampling": jspec.SamplingParams(temperature=0.0)},
    "filters": {"sampling": jspec.SamplingParams(temperature=0.8, top_k=9, repetition_penalty=1.2), "seed": 3},
    "stops": {"stop": ["e", "a", " "], "max_new_tokens": 60, "seed": 1},
    "a special token stops": {"stop": [text_pair.END], "max_new_tokens": 60, "seed": 2},
    "characters": {"sampling": jspec.SamplingParams(temperature=3.0), "max_new_tokens": 50},
}


@pytest.fixture(scope="module")
def pair(sources):
    tokenizer = text_pair.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return *(jspec.load(folder) for folder in sources), tokenizer


def joined(parts):
    """Join the parts into the fields that `jspec.complete` returns."""
    fields = {
        name: [*itertools.chain(*(getattr(part, name) for part in parts))]
        for name in ("pieces", "tokens", "logprobs", "origins")
    }
    return fields | {"finish_reason": parts[-1].finish_reason}


def check(parts, done):
    found = joined(parts)
    assert {name: found[name] for name in ("pieces", "tokens", "finish_reason")} == {
        name: getattr(done, name) for name in ("pieces", "tokens", "finish_reason")
    }
    np.testing.assert_allclose(found["logprobs"], done.logprobs, atol=2e-5)
    assert len(found["origins"]) == len(done.tokens)
    assert all(part.finish_reason is None for part in parts[:-1])
    stats = parts[-1].stats
    assert stats["tokens"] >= len(done.tokens) and stats["accepted"] <= stats["judged"] <= stats["drafted"]
    assert stats["accepted"] == sum(stats["accepted_at"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafter", ["model", "lookup", "tree", "none"])
def test_stream_equals_plain_decoding(pair, drafter, kind):
    target, draft, tokenizer = pair
    draft = {
        "model": draft,
        "lookup": jspec.NGramDrafter(),
        "tree": jspec.TreeDrafter(draft, jspec.Tree([0, 0, 1])),
        "none": None,
    }[drafter]
    options = {"max_new_tokens": 30} | KINDS[kind]
    (done,) = jspec.complete(target, None, tokenizer, PROMPT, **options)
    parts = [*jspec.stream(target, draft, tokenizer, PROMPT, **options)]
    check(parts, done)
    assert len(parts) > 1 or done.finish_reason != "length"


def test_conversation_and_ids_are_accepted_as_prompts(pair):
    target, draft, tokenizer = pair
    for prompt in ([{"role": "user", "content": "Hello"}], tokenizer(PROMPT)["input_ids"]):
        (done,) = jspec.complete(target, None, tokenizer, prompt, max_new_tokens=9)
        check([*jspec.stream(target, draft, tokenizer, prompt, max_new_tokens=9)], done)


def test_different_text_does_not_recompile(pair, compilations):
    def text(prompt, **options):
        return "".join(part.text for part in jspec.stream(*pair, prompt, **{"max_new_tokens": 40} | options))

    text(PROMPT)
    text(PROMPT, sampling=jspec.SamplingParams(top_p=0.9))
    before = compilations()
    text("the", max_new_tokens=31, seed=9)
    text("a", sampling=jspec.SamplingParams(temperature=0.3, min_p=0.1))
    assert compilations() == before


def test_stream_decodes_only_on_demand(pair, monkeypatch):
    calls, decode_rounds = [], Runner.decode_rounds
    monkeypatch.setattr(Runner, "decode_rounds", lambda *arguments: (calls.append(0), decode_rounds(*arguments))[1])
    parts = jspec.stream(*pair, PROMPT, max_new_tokens=100)
    assert not calls
    next(parts)
    few = len(calls)
    assert 0 < few <= 3
    parts.close()
    assert len(calls) <= few + 1


def test_mistakes_are_reported_at_once(pair):
    target, draft, tokenizer = pair
    for wrong, message in (
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 10**6}, "shorten the prompt or reduce"),
        ({"stop": [""]}, "stop"),
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"seed": -1}, "seed"),
        ({"sampling": jspec.SamplingParams(temperature=-1.0)}, "temperature"),
        ({"prompt": ""}, "is empty"),
    ):
        prompt = {"prompt": PROMPT, "max_new_tokens": 9} | wrong
        with pytest.raises(ValueError, match=message):
            jspec.stream(target, draft, tokenizer, **prompt)
    with pytest.raises(ValueError, match="num_draft_tokens"):
        jspec.stream(target, None, tokenizer, PROMPT, num_draft_tokens=3)
    with pytest.raises(TypeError, match="tokenizer"):
        jspec.stream(target, draft, None, PROMPT)


def test_failure_is_raised(pair, monkeypatch):
    monkeypatch.setattr(Runner, "decode_rounds", lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        [*jspec.stream(*pair, PROMPT, max_new_tokens=9)]


def test_streams_of_one_engine_may_be_interleaved(pair):
    """An engine's streams can be read in any order, and closing one early does not affect the others."""
    target, draft, _ = pair
    keys = jax.random.split(jax.random.key(0), 3)
    requests = [Request((5, 6, 7 + i), 20, key=keys[i]) for i in range(3)]
    alone = [
        jspec.generate(target, np.array([one.tokens]), np.array([3]), one.key[None], max_new_tokens=20)
        for one in requests
    ]
    engine = Engine(target, draft, slots=2, max_length=64, num_draft_tokens=3)
    first, second, third = map(engine.stream_sync, requests)
    next(first)
    next(second)
    first.close()
    results = [*third][-1], [*second][-1]
    for result, i in zip(results, (2, 1), strict=True):
        assert result.tokens == alone[i].tokens[0].tolist() and result.finish_reason == "length"
    with engine, pytest.raises(RuntimeError, match="running in its own thread"):
        engine.stream_sync(requests[0])


def test_cached_programs_keep_no_weights(pair):
    target, draft, _ = pair
    engine = Engine(target, draft, slots=1, max_length=96, num_draft_tokens=2)
    assert [*engine.here(Request((5, 6), 9, key=jax.random.key(0)))][-1].finish_reason == "length"
    freed = weakref.ref(engine.device)
    del engine
    gc.collect()
    assert freed() is None
