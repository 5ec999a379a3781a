"""Helpers for the matrix tests and others."""

import functools

import jax
import numpy as np

from jspec.core.sampling import SamplingParams
from support import oracle, toys
from support.law import NUM_TOKENS, VOCAB, exact_law, text_counts
from support.oracle import ALPHA

SETTINGS = ({"temperature": 0.0}, {"temperature": 0.7}, {"min_p": 0.2, "repetition_penalty": 1.4})


# Some prompts repeat themselves, so that lookup finds something.
PROMPTS = ((6, 1, 6, 1), (5,), (4, 4, 0, 4), (2, 7, 2), (3, 3))


@functools.cache
def pair():
    target = toys.tiny_llama(10)
    return target, toys.tiny_llama(11, 1, related_to=target)


def ragged(count):
    """Return the first `count` prompts, with the settings in turn; three prompts meet every setting."""
    return list(PROMPTS[:count]), [SETTINGS[i % len(SETTINGS)] for i in range(count)]


def text_p_values(drafter, rule, draws, k, batches=None):
    """Return (batch number, row) -> the p-value of its outputs against the target's enumerated distribution."""
    target, p_values = pair()[0], {}
    for number, (prompts, settings) in enumerate(batches or [ragged(3)]):
        tokens = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        # Use arrays, and only these fields, to keep programs few and small. min_p is the cheapest of the filters.
        off = {"temperature": 1, "min_p": 0, "repetition_penalty": 1}
        sampling = SamplingParams(
            **{name: np.array([row.get(name, off[name]) for row in settings], np.float32) for name in off}
        )
        keys = jax.random.split(jax.random.key(number), (draws, len(prompts)))
        counts = text_counts(target, drafter, tokens, np.array([len(p) for p in prompts]), keys, sampling, rule, k)
        for i, row in enumerate(zip(prompts, settings, strict=True)):
            p_values[number, i] = oracle.p_value(np.asarray(counts[i]), exact_law(target, *row))
    return p_values


def check_texts(report, p_values, draws, tests):
    """Report the smallest of `p_values`, and check it; `tests` such checks share ALPHA."""
    worst, alpha = min(p_values, key=p_values.get), ALPHA / len(p_values) / tests
    report(
        settings=len(p_values),
        texts_each=draws,
        min_p=f"{p_values[worst]:.2g}",
        at=worst,
        alpha_over_all=ALPHA,
        sees_tv=f"{oracle.detectable(draws, VOCAB**NUM_TOKENS - 1, alpha):.3f}",
    )
    assert p_values[worst] > alpha
