"""The server in front of replicas: clients do not notice that replicas are lost."""

import asyncio
import random

import httpx
import jax
import openai
import pytest

import jspec
from jspec.cluster.serve.replica_metrics import ReplicaMetrics
from jspec.cluster.serve.replicated_engine import ReplicatedEngine
from jspec.engine import Engine
from jspec.serve.app import Server, grammars_for
from support import text_pair
from support.replicas import FlakyReplicas
from support.servers import HELLO, NAME, OPTIONS, PROMPT, tokenizer

pytestmark = pytest.mark.usefixtures("quick_compile")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
BODIES = [
    {},
    {"n": 2, "max_tokens": 20},
    {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"logprobs": 3, "echo": True},
    {"stop": ["a"], "max_tokens": 40},
    {"extra_body": {"min_tokens": 8, "top_k": 20, "repetition_penalty": 1.2}},
    {"extra_body": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}},
    {"temperature": 0},
]


def lost_at_random(call, count):
    rng = random.Random(call)
    if rng.random() < 0.4 and count == rng.randrange(6):
        raise ConnectionError("planted")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [jspec.load(text_pair.write(folder / str(d), d)) for d in (0.0, 0.1)]


def answers(models, fail):
    """Return the choices of every body, streamed and whole, and the metrics."""
    words = tokenizer()
    engines = [
        (Engine(*models, max_waiting=100, **OPTIONS), grammars_for(models[0], words)),
        (Engine(models[0], max_waiting=100, **OPTIONS | {"num_draft_tokens": "auto"}), grammars_for(models[0], words)),
    ]
    flaky = FlakyReplicas(engines, fail)

    async def ask(client, body, stream):
        given = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "seed": 5} | body
        if not stream:
            answer = await client.completions.create(**given)
            return [(one.text, one.finish_reason, one.logprobs and one.logprobs.tokens) for one in answer.choices]
        texts, reasons = {}, {}
        async for chunk in await client.completions.create(**given, stream=True):
            for one in chunk.choices:
                texts[one.index] = texts.get(one.index, "") + one.text
                reasons[one.index] = one.finish_reason or reasons.get(one.index)
        return [(texts[i], reasons[i]) for i in sorted(texts)]

    async def run():
        engine = ReplicatedEngine(flaky, flaky.replicas[0].info(), 2)
        server = Server(engine, words, NAME, max_waiting=100)
        server.metrics.register(ReplicaMetrics(engine, NAME, "jspec_"))
        await asyncio.to_thread(server.warm_up)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app)) as http:
            client = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=http, max_retries=0)
            asked = [ask(client, body, stream) for body in BODIES for stream in (False, True)]
            found = await asyncio.gather(*asked)
            chat = await client.chat.completions.create(model=NAME, messages=HELLO, seed=3, max_completion_tokens=9)
            metrics = (await http.get("http://127.0.0.1/metrics")).text
        server.close()
        return [*found, chat.choices[0].message.content], metrics

    try:
        return asyncio.run(run())
    finally:
        flaky.close()
        for _, grammars in engines:
            grammars.close()


def test_clients_get_the_same_answers_when_replicas_are_lost(models, report):
    calm, _ = answers(models, lambda call, count: 0)
    disturbed, metrics = answers(models, lost_at_random)
    assert disturbed == calm
    moved = float(metrics.split('moved_requests_total{model_name="tiny",reason="lost"} ')[1].split()[0])
    report(answers=len(calm), moved=moved)
    assert moved >= 4 and 'moved_request_pause_seconds{model_name="tiny",quantile="0.99"}' in metrics
    for whole, streamed in zip(calm[:-1:2], calm[1:-1:2], strict=True):
        assert [one[:2] for one in whole] == streamed


def test_seeded_answers_are_those_of_generate(models):
    [[(text, *_)], *_], _ = answers(models, lost_at_random)
    words = tokenizer()
    ids = words(PROMPT)["input_ids"]
    keys = jax.random.fold_in(jax.random.key(5), 0)[None]
    out = jspec.generate(models[0], [ids], [len(ids)], keys, max_new_tokens=12, eos_ids=(0,))
    assert words.decode(out.tokens[0, : out.lengths[0]].tolist(), skip_special_tokens=True) == text
