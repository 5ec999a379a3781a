"""The most likely tokens at every new token, from `generate` and `speculative_generate`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.engine import Engine, Request

pytestmark = pytest.mark.usefixtures("quick_compile")
NEW, TOP = 8, 5


@pytest.fixture(scope="module")
def models(toy):
    return toy(0), toy(0, distance=0.2)


def run(models, batch, drafted, **options):
    if drafted:
        return jspec.speculative_generate(*models, *batch, max_new_tokens=NEW, num_draft_tokens=3, **options)
    return jspec.generate(models[0], *batch, max_new_tokens=NEW, **options)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
def test_top_tokens_are_those_of_the_model(models, prompts, drafted, samples):
    """They come from the logits before any transform, for every new token and in rows of any length."""
    target, (tokens, lengths, _) = models[0], prompts([4, 7, 2])
    keys = jax.random.split(jax.random.key(3), 3 * samples)
    sampling = jspec.SamplingParams(temperature=1.3, top_k=9, repetition_penalty=1.2, max_tokens=[8, 3, 5] * samples)
    options = {"sampling": sampling, "samples_per_prompt": samples, "top_logprobs": TOP}
    out = run(models, (tokens, lengths, keys), drafted, **options)
    plain = run(models, (tokens, lengths, keys), drafted, **options | {"top_logprobs": 0})
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert plain.top_ids is None and plain.top_logprobs is None
    assert out.top_ids.shape == out.top_logprobs.shape == (3 * samples, NEW, TOP)

    texts, totals = out.with_prompts(tokens, lengths)
    hidden, _ = target.forward(texts, target.new_cache(*texts.shape), jnp.zeros(len(texts), jnp.int32))
    expected = jax.nn.log_softmax(target.logits(hidden))
    for row, (start, end) in enumerate(zip(np.repeat(lengths, samples), totals, strict=True)):
        for place in range(NEW):
            ids, found = out.top_ids[row, place], out.top_logprobs[row, place]
            if place >= end - start:
                assert not np.any(ids) and not np.any(found)
                continue
            wanted = jax.lax.top_k(expected[row, start + place - 1], TOP)
            np.testing.assert_allclose(found, wanted[0], atol=1e-5)
            np.testing.assert_array_equal(ids, wanted[1])


def test_engine_reports_the_same(models, prompts):
    target, (tokens, lengths, keys) = models[0], prompts([5])
    out = jspec.generate(target, tokens, lengths, keys, max_new_tokens=NEW, top_logprobs=TOP)
    with Engine(target, slots=1, max_length=32) as engine:
        request = Request(tuple(tokens[0, : lengths[0]].tolist()), NEW, key=keys[0], top_logprobs=TOP)
        (result,) = engine.generate([request])
    np.testing.assert_array_equal(result.tokens, out.tokens[0])
    for place, top in enumerate(result.top_logprobs):
        assert [i for i, _ in top] == out.top_ids[0, place].tolist()
        np.testing.assert_allclose([value for _, value in top], out.top_logprobs[0, place], atol=1e-5)


@pytest.mark.parametrize("top", [-1, 62, 1.5, True, "3"])
def test_invalid_numbers_are_rejected(models, prompts, top):
    for drafted in (False, True):
        with pytest.raises(ValueError, match=r"top_logprobs must be a Python int from 0 to 61"):
            run(models, prompts([3]), drafted, top_logprobs=top)
