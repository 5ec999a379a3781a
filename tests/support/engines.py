"""Helpers for the engine tests and others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.engine import Request
from support.law import VOCAB

LONGEST, NEW = 48, 24


OPTIONS = {"slots": 4, "max_length": LONGEST + NEW, "chunks": (4, 16), "read_tokens": 16, "rounds": 3}


def turns(i):
    """Return different sampling parameters for every request; some have none besides a temperature."""
    return [
        {},
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 5, "presence_penalty": 0.5},
        {"top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 0.6},
        {"min_p": 0.05, "frequency_penalty": 0.3},
        {"logit_bias": np.where(np.arange(VOCAB) == i % VOCAB, 1.5, 0.0).astype(np.float32)},
        {"min_tokens": 6, "temperature": 1.5},
    ][i % 8]


def made(count, seed=0, seeded=True):
    """Return `count` requests of varied length, limit, EOS ids and sampling parameters."""
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed), count)
    return [
        Request(
            tuple(rng.integers(VOCAB, size=rng.integers(1, LONGEST + 1)).tolist()),
            int(rng.integers(1, NEW + 1)),
            jspec.SamplingParams(**turns(i)),
            keys[i] if seeded else None,
            (i % VOCAB,) if i % 3 == 0 else (),
        )
        for i in range(count)
    ]


def _every_field(request):
    """Return a request's sampling parameters with an array in every field, so that all requests share one program.

    The arrays are on the device, where `jspec.generate` does not see that a field is at its default.
    """
    sampling = dataclasses.replace(request.sampling, max_tokens=request.max_new_tokens)
    fields = {
        name: jnp.asarray([value], np.float32 if isinstance(value, float) else np.int32)
        for name, value in vars(sampling).items()
        if isinstance(value, int | float)
    }
    bias = np.zeros(VOCAB, np.float32) if sampling.logit_bias is None else sampling.logit_bias
    return dataclasses.replace(sampling, **fields, logit_bias=bias)


def alone(target, requests):
    """Return the output of `jspec.generate` for each request in a batch of its own; all share one program."""
    texts = []
    for request in requests:
        tokens = np.zeros((1, LONGEST + NEW), np.int32)
        tokens[0, : len(request.tokens)] = request.tokens
        batch, eos_ids = (tokens, np.array([len(request.tokens)]), request.key[None]), request.eos_ids or (-1,)
        options = {"sampling": _every_field(request), "eos_ids": np.array([eos_ids])}
        out = jax.device_get(jspec.generate(target, *batch, max_new_tokens=NEW, **options))
        texts.append((out.tokens[0, : out.lengths[0]].tolist(), out.raw_logprobs[0, : out.lengths[0]]))
    return texts


def check_texts(target, requests, results):
    """Check that outputs equal those of `alone`, and log-probabilities up to rounding."""
    for request, result, (tokens, logprobs) in zip(requests, results, alone(target, requests), strict=True):
        assert result.tokens == tokens
        np.testing.assert_allclose(result.raw_logprobs, logprobs, atol=2e-5)
        ended = tokens[-1] in request.eos_ids
        assert result.finish_reason == ("eos" if ended else "length"), result.error
        assert len(result.origins) == len(result.logprobs) == len(tokens)
        assert sum(result.accepted) <= sum(result.judged) <= sum(result.drafted)
