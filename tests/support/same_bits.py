"""Assertions that drafting, batching and an engine change no bit of an output or of its log-probabilities."""

import functools
from collections import Counter

import numpy as np

import jspec
from jspec.engine import Engine, Request

FIELDS = ("tokens", "logprobs", "raw_logprobs")


def assert_same_bits(model, batch, new_tokens, temperature):
    """Assert that outputs have the bits of plain decoding of the whole batch.

    Prompt lookup, a draft model and a tree decode the batch and one of its rows. Plain decoding decodes one row.

    Returns:
        The numbers of accepted and of judged draft tokens, by drafter.
    """
    options = {"max_new_tokens": new_tokens, "sampling": jspec.SamplingParams(temperature=temperature)}
    plain = jspec.generate(model, *batch, **options)
    drafted = functools.partial(jspec.speculative_generate, model, accept="coupled", **options)
    small = jspec.ModelDrafter(jspec.quantize(model, "int4"))
    runs = {
        "plain": lambda *batch: jspec.generate(model, *batch, **options),
        "lookup": functools.partial(drafted, jspec.NGramDrafter(), num_draft_tokens=9),
        "model": functools.partial(drafted, small, num_draft_tokens=4),
        "tree": functools.partial(drafted, jspec.TreeDrafter(small, jspec.Tree.branching((3, 2, 1)))),
    }
    accepted, judged = Counter(), Counter()
    for name, run in runs.items():
        for rows in (slice(1, 2),) if name == "plain" else (slice(None), slice(2, 3)):
            found = run(*(part[rows] for part in batch))
            accepted[name] += int(found.stats.accepted.sum())
            judged[name] += int(found.stats.judged.sum())
            for field in FIELDS:
                both = (np.asarray(part).tobytes() for part in (getattr(found, field), getattr(plain, field)[rows]))
                assert len({*both}) == 1, (name, rows, field)
    return accepted, judged


def assert_engine_has_same_bits(model, batch, new_tokens, temperature, slots):
    """Assert that an engine's outputs have the bits of plain decoding.

    The engine drafts, has fewer slots than requests, and receives each request twice. Return the number of accepted
    draft tokens.
    """
    sampling = jspec.SamplingParams(temperature=temperature)
    plain = jspec.generate(model, *batch, max_new_tokens=new_tokens, sampling=sampling)
    rows = [(tuple(row[:size].tolist()), key) for row, size, key in zip(*batch, strict=True)]
    requests = [Request(row, new_tokens, sampling, key) for row, key in rows]
    small, longest = jspec.quantize(model, "int4"), max(len(row) for row, _ in rows) + new_tokens
    with Engine(model, small, slots=slots, max_length=longest, chunks=(8,), num_draft_tokens=3) as engine:
        results = engine.generate([*requests, *requests])
    for i, result in enumerate(results):
        for field in FIELDS:
            expected = np.asarray(getattr(plain, field)[i % len(rows)])
            found = np.asarray(getattr(result, field), expected.dtype)
            assert found.tobytes() == expected.tobytes(), (i, field)
    return sum(sum(result.accepted) for result in results)
