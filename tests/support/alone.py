"""Helpers for the tests of each sampling setting alone, and others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from jspec.core import keys as streams
from support import oracle, toys

ROWS, NEW, VOCAB, PROMPT = 32, 24, 8, (3, 6)


BIAS = np.array([0.7, -0.4, 0, 0, 1.1, -np.inf, 0, -1.0], np.float32)


PENALTIES = {"repetition_penalty": 1.6, "presence_penalty": 1.1, "frequency_penalty": 0.5}


ALONE = {"top_k": 3, "top_p": 0.7, "min_p": 0.2, "logit_bias": BIAS} | PENALTIES


@functools.cache
def noise():
    """Return the noise that the target's tokens are sampled with, ``float64[ROWS, NEW, 2, W]``."""
    keys = jax.random.split(jax.random.key(3), ROWS)
    positions = jnp.broadcast_to(len(PROMPT) + jnp.arange(NEW), (ROWS, NEW))
    return np.asarray(streams.target_noise(keys, positions, VOCAB), np.float64)


def expected(name):
    """Return the oracle's outputs, ``int[ROWS, NEW]``, with only the setting called `name`."""
    table = np.asarray(toys.markov_pair(7)[0].table)
    texts = np.full((ROWS, 0), PROMPT[-1])
    for i in range(NEW):
        last = texts[:, -1] if i else np.full(ROWS, PROMPT[-1])
        laws = [
            oracle.sampling_law(table[token], prompt=PROMPT, generated=text, **{name: ALONE[name]})
            for token, text in zip(last, texts, strict=True)
        ]
        texts = np.column_stack([texts, oracle.sample_with_noise(noise()[:, i], np.stack(laws))])
    return texts


def differing(name, num_draft_tokens=0):
    """Return how many of jspec's tokens differ from `expected`, in plain decoding or with drafts under "coupled"."""
    target, draft = toys.markov_pair(7)
    batch = np.tile(PROMPT, (ROWS, 1)), np.full(ROWS, len(PROMPT)), jax.random.split(jax.random.key(3), ROWS)
    options = {"max_new_tokens": NEW, "sampling": jspec.SamplingParams(**{name: ALONE[name]})}
    if num_draft_tokens:
        draft = jspec.ModelDrafter(draft)
        options |= {"num_draft_tokens": num_draft_tokens, "accept": "coupled"}
        out = jspec.speculative_generate(target, draft, *batch, **options)
    else:
        out = jspec.generate(target, *batch, **options)
    return int((np.asarray(out.tokens) != expected(name)).sum())
