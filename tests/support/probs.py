"""Helpers for the tests of `jspec.core.probs` and others."""

import jax
import numpy as np

from jspec.core import probs
from jspec.core.keys import gumbel
from support import oracle

LLAMA_3 = 128_256


NEAR = 1e-5


def law(rng, rows, vocab_size):
    """Return distributions with a head and a long tail, like a language model's: from 0.1 down to 1e-9 and 0."""
    weights = np.exp(3.0 * rng.normal(size=(rows, vocab_size))) * (rng.random((rows, vocab_size)) < 0.9)
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def near_ties(rng, laws, width):
    """Return noise ``float32[N, 2, W]`` with ties up to `NEAR`: of blocks in even rows, of tokens in odd rows.

    Everything else is far behind. So if a block's score is off the log of its mass by more than `NEAR`, or a token's
    score off the log of its probability, about half of the ties fall wrong.
    """
    noise = np.full((len(laws), 2, width), -100.0)
    for row, masses in enumerate(laws.astype(float)):
        blocks = np.pad(masses, (0, -masses.size % width)).reshape(-1, width)
        part, tied = row % 2, blocks.sum(-1)
        if part == 0:
            noise[row, 1] = 0
        else:
            block = rng.choice(np.flatnonzero((blocks > 0).sum(-1) > 1))
            noise[row, 0, block], tied = 0, blocks[block]
        first, second = rng.choice(np.flatnonzero(tied), 2, replace=False)
        noise[row, part, [first, second]] = -np.log(tied[[first, second]]) + [0, NEAR]
    return noise.astype(np.float32)


def wrong_draws(rows=40, vocab_size=LLAMA_3, seed=0):
    """Return the number of wrong draws, of `rows` near ties and as many with Gumbel noise, and the last token drawn."""
    rng = np.random.default_rng(seed)
    laws = law(rng, rows, vocab_size)
    drawn = np.asarray(gumbel(jax.random.split(jax.random.key(seed), rows), vocab_size))
    sample_with_noise = jax.jit(lambda *args: probs.sample_with_noise(*args))  # as patched now
    wrong, last = 0, 0
    for noise in (near_ties(rng, laws, drawn.shape[-1]), drawn):
        tokens = np.asarray(sample_with_noise(noise, laws))
        wrong += int((tokens != oracle.sample_with_noise(noise, laws)).sum())
        last = max(last, int(tokens.max()))
    return wrong, last
