"""Log-likelihoods equal those of a direct computation, and continuations those of `jspec.generate`."""

import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert.generation_config import SamplingDefaults
from jspec import text
from jspec.decoding.program import decode_program
from jspec.evaluation.continuations import Decoder, sampling_of, stop_ids
from jspec.evaluation.likelihoods import log_likelihoods
from jspec.text.prompt_batches import batches
from support import text_pair

pytestmark = pytest.mark.usefixtures("quick_compile")
RNG = np.random.default_rng(0)
PAIRS = [
    (RNG.integers(0, 61, context).tolist(), RNG.integers(0, 61, continuation).tolist())
    for context, continuation in [(1, 1), (5, 3), (40, 1), (31, 1), (31, 2), (2, 200), (150, 20)]
]


def direct(model, context, continuation):
    """Return the log-likelihood and the greedy flag from all logits of one text."""
    ids = [*context, *continuation]
    log_probs = np.asarray(jax.nn.log_softmax(model(jnp.array([ids]))[0]), np.float64)[len(context) - 1 : -1]
    return log_probs[np.arange(len(continuation)), continuation].sum(), [*log_probs.argmax(-1)] == continuation


def greedy(model, context, count):
    ids = list(context)
    for _ in range(count):
        ids.append(int(model(jnp.array([ids]))[0, -1].argmax()))
    return ids[len(context) :]


@pytest.mark.parametrize("batch_size", [3, 64])
def test_log_likelihoods_equal_direct_computation(toy, batch_size):
    """Some continuations are greedy in all tokens, and some in all except the first or the last."""
    model, context = toy(0), PAIRS[1][0]
    best = greedy(model, context, 3)
    wrong = (best[0] + 1) % 61
    others = [[wrong, *greedy(model, [*context, wrong], 2)], [*best[:2], (best[2] + 1) % 61], best[:1]]
    pairs = [*PAIRS, *((context, continuation) for continuation in [best, *others])]
    found = dict(log_likelihoods(model, pairs, batch_size))
    assert sorted(found) == [*range(len(pairs))]
    for i, (context, continuation) in enumerate(pairs):
        expected, is_greedy = direct(model, context, continuation)
        assert found[i] == (pytest.approx(expected, abs=2e-4), is_greedy)
    assert [found[i][1] for i in range(len(PAIRS), len(pairs))] == [True, False, False, True]


def test_pairs_that_differ_in_the_last_token_are_computed_once(toy, monkeypatch):
    """A text whose tokens are divided differently also counts as the same."""
    model, calls = toy(0), []

    def counted(rows, **options):
        calls.extend(rows)
        return batches(rows, **options)

    monkeypatch.setattr("jspec.evaluation.likelihoods.batches", counted)
    pairs = [([1, 2, 3], [token]) for token in range(20)] + [([1, 2], [3, 4]), ([1], [2, 3, 5])]
    found = dict(log_likelihoods(model, pairs, 8))
    assert calls == [(1, 2, 3)]
    assert all(found[i][0] == pytest.approx(direct(model, *pair)[0], abs=1e-4) for i, pair in enumerate(pairs))
    assert sum(np.exp(score) for _, (score, _) in log_likelihoods(model, [([7], [i]) for i in range(61)], 8)) == (
        pytest.approx(1, abs=1e-5)
    )


def test_no_requests_have_no_results(toy):
    assert [*log_likelihoods(toy(0), [], 8)] == []


def test_model_reads_all_tokens_except_the_last(toy):
    """A text may have one token more than the model has positions."""
    model = toy(0, max_position_embeddings=64)
    context, continuation = RNG.integers(0, 61, 60).tolist(), RNG.integers(0, 61, 5).tolist()
    ((_, (found, _)),) = log_likelihoods(model, [(context, continuation)], 8)
    assert found == pytest.approx(direct(toy(0), context, continuation)[0], abs=1e-4)


@pytest.mark.parametrize(("drafted", "temperature"), [(False, 0.0), (False, 0.8), (True, 0.0)])
def test_continuations_equal_plain_decoding_of_each_prompt(toy, drafted, temperature):
    """With a draft, only greedy text is the same, because the default rule is not coupled."""
    target, prompts = toy(0), [context for context, _ in PAIRS[:5]]
    keys, sampling = text.request_keys(5, 5), jspec.SamplingParams(temperature=temperature)
    decoder = Decoder(target, toy(0, 0.3) if drafted else None, None, 2)
    found = dict(decoder.continuations(prompts, keys, 9, sampling, {3, 8, 500}))
    for i, prompt in enumerate(prompts):
        out = jspec.generate(
            target, [prompt], [len(prompt)], keys[i : i + 1], max_new_tokens=9, sampling=sampling, eos_ids=[3, 8]
        )
        assert found[i] == out.tokens[0, : out.lengths[0]].tolist()


def test_draft_is_not_used_beyond_its_positions(toy):
    """Short prompts are drafted, and long ones are decoded without the draft."""
    target, draft = toy(0), toy(0, 0.3, max_position_embeddings=16)
    prompts = [RNG.integers(0, 61, size).tolist() for size in (20, 4)]
    keys, greedy = text.request_keys(5, 2), jspec.SamplingParams(temperature=0.0)
    found = [
        dict(Decoder(target, each, None, 1).continuations(prompts, keys, 9, greedy, set())) for each in (draft, None)
    ]
    assert found[0] == found[1]


def test_batches_of_one_task_share_their_programs(toy):
    """The number of new tokens fixes a shape, whatever the lengths of the prompts and the room after them."""
    target, before = toy(0, max_position_embeddings=128), decode_program._cache_size()
    prompts = [RNG.integers(0, 61, size).tolist() for size in (70, 74, 78, 82)]
    keys, greedy = text.request_keys(5, 4), jspec.SamplingParams(temperature=0.0)
    assert len(dict(Decoder(target, None, None, 1).continuations(prompts, keys, 40, greedy, set()))) == 4
    assert decode_program._cache_size() == before + 1


def test_stop_ids_are_tokens_that_equal_a_string():
    tokenizer = text_pair.tokenizer()
    letters = tokenizer.get_vocab()
    found = stop_ids(tokenizer, ["the", "\n", "then", text_pair.END, "\n\n"])
    assert found == {letters["the"], letters["Ċ"], 0}


def test_sampling_follows_transformers(toy):
    """Greedy by default; with sampling, missing fields are the model's, or else those of transformers."""
    target = toy(0)
    assert sampling_of(target, {}) == jspec.SamplingParams(temperature=0.0)
    assert sampling_of(target, {"do_sample": False, "temperature": 0.0, "top_p": 0.9}).top_p == 1.0
    found = sampling_of(target, {"do_sample": True, "temperature": 0.7, "num_beams": 1})
    assert (found.temperature, found.top_k, found.top_p) == (0.7, 50, 1.0)
    target = toy(0, sampling=SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1))
    found = sampling_of(target, {"do_sample": True, "temperature": 0.7, "top_p": 0.5})
    assert (found.temperature, found.top_k, found.top_p, found.repetition_penalty) == (0.7, 20, 0.5, 1.1)
    assert sampling_of(target, {}) == jspec.SamplingParams(temperature=0.0, repetition_penalty=1.1)
    for options, message in (
        ({"num_beams": 4, "stop": 1}, "contain num_beams, stop, which jspec does not support; use only until"),
        ({"do_sample": True}, "do_sample is true, but temperature is 0 or missing; set a temperature above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            sampling_of(target, options)


def test_missing_package_is_named(monkeypatch):
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "jspec.evaluation.lm_eval", raising=False)
    message = r'^JSpecLM needs lm-eval 0\.4\.13, which cannot be imported \(.*\); run pip install "jspec\[eval\]"\.$'
    with pytest.raises(ImportError, match=message):
        importlib.import_module("jspec.evaluation.lm_eval")
