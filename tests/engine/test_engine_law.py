"""The engine's outputs have the target's enumerated distribution, for requests with and without keys, mixed."""

import jax
import numpy as np
import pytest

import jspec
from jspec.engine import Engine, Request
from support import oracle, toys
from support.law import NUM_TOKENS, VOCAB, exact_law
from support.matrix import PROMPTS, SETTINGS

pytestmark = pytest.mark.usefixtures("quick_compile")


def check_law(report, count):
    """Compare keyed and unkeyed requests that share slots, one after another, with the enumerated distributions."""
    target = toys.tiny_llama(10)
    drafter = toys.tiny_llama(11, 1, related_to=target)
    asked = [(prompt, settings) for prompt, settings in zip(PROMPTS, SETTINGS, strict=False)]
    counts = np.zeros((2, len(asked), VOCAB**NUM_TOKENS), np.int64)
    keys = jax.random.split(jax.random.key(3), count)
    with Engine(
        target, drafter, slots=32, max_length=16, num_draft_tokens=2, chunks=(8,), rounds=4, max_waiting=256
    ) as engine:
        kinds = [(seeded, i, n) for n in range(count) for i in range(len(asked)) for seeded in (0, 1)]
        requests = [
            Request(asked[i][0], NUM_TOKENS, jspec.SamplingParams(**asked[i][1]), keys[n] if seeded else None)
            for seeded, i, n in kinds
        ]
        for (seeded, i, _), result in zip(kinds, engine.generate(requests), strict=True):
            counts[seeded, i, np.ravel_multi_index(result.tokens, (VOCAB,) * NUM_TOKENS)] += 1
    p_values = [oracle.p_value(counts[seeded, i], exact_law(target, *asked[i])) for seeded in (0, 1) for i in range(3)]
    sees = oracle.detectable(count, VOCAB**NUM_TOKENS - 1, oracle.ALPHA / 6)
    report(settings=6, texts_each=count, min_p=f"{min(p_values):.2g}", sees_tv=f"{sees:.3f}")
    assert min(p_values) > oracle.ALPHA / 6


def test_texts_have_target_distribution(report):
    check_law(report, 2_000)


@pytest.mark.slow
def test_texts_have_target_distribution_at_length(report):
    check_law(report, 40_000)
