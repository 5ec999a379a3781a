"""Outputs that one engine begins and another continues, as after the loss of a replica."""

import dataclasses

import numpy as np
import pytest

import jspec
from jspec.engine import Engine, Request
from support import constrained, oracle, toys
from support.engines import LONGEST, OPTIONS, check_texts, made
from support.law import NUM_TOKENS, VOCAB, exact_law
from support.matrix import PROMPTS, SETTINGS

pytestmark = pytest.mark.usefixtures("quick_compile")


def continued(requests, results, lengths):
    """Return requests that continue after the given number of tokens of each result."""
    return [
        dataclasses.replace(request, generated=tuple(result.tokens[:length]))
        for request, result, length in zip(requests, results, lengths, strict=True)
    ]


@pytest.mark.parametrize("draft", ["another draft", "no draft"])
def test_continued_outputs_equal_uninterrupted_ones(draft):
    """The second engine may have other slots, drafts and draft lengths; penalties count the first engine's tokens."""
    target = toys.tiny_llama(0)
    requests = [request for request in made(60) if request.max_new_tokens > 2]
    with Engine(target, toys.tiny_llama(1, 1, related_to=target), **OPTIONS) as engine:
        whole = engine.generate(requests)
    check_texts(target, requests, whole)
    lengths = [(i * 7) % len(result.tokens) for i, result in enumerate(whole)]
    other = toys.tiny_llama(2, 1) if draft == "another draft" else None
    with Engine(target, other, **OPTIONS | {"slots": 3}) as engine:
        rest = engine.generate(continued(requests, whole, lengths))
    for before, length, after in zip(whole, lengths, rest, strict=True):
        assert after.tokens == before.tokens[length:] and after.finish_reason == before.finish_reason
        np.testing.assert_allclose(after.raw_logprobs, before.raw_logprobs[length:], atol=2e-5)


def test_continued_outputs_without_key_have_target_distribution(report):
    """Interrupted after one or two tokens, outputs without a key have the target's enumerated distribution."""
    count = 2_000
    target = toys.tiny_llama(10)
    settings = list(zip(PROMPTS[:2], SETTINGS, strict=False))
    counts = np.zeros((len(settings), VOCAB**NUM_TOKENS), np.int64)
    options = {"slots": 32, "max_length": 16, "num_draft_tokens": 2, "chunks": (8,), "rounds": 1, "max_waiting": 256}
    with Engine(target, toys.tiny_llama(11, 1, related_to=target), **options) as engine:
        kinds = [i for i in range(len(settings)) for _ in range(count)]
        requests = [Request(settings[i][0], NUM_TOKENS, jspec.SamplingParams(**settings[i][1])) for i in kinds]
        begun = engine.generate(requests)
        lengths = [1 + j % 2 for j in range(len(kinds))]
        for i, before, length, after in zip(
            kinds, begun, lengths, engine.generate(continued(requests, begun, lengths)), strict=True
        ):
            counts[i, np.ravel_multi_index(before.tokens[:length] + after.tokens, (VOCAB,) * NUM_TOKENS)] += 1
    p_values = [oracle.p_value(counts[i], exact_law(target, *of)) for i, of in enumerate(settings)]
    sees = oracle.detectable(count, VOCAB**NUM_TOKENS - 1, oracle.ALPHA / len(settings))
    report(settings=len(settings), texts_each=count, min_p=f"{min(p_values):.2g}", sees_tv=f"{sees:.3f}")
    assert min(p_values) > oracle.ALPHA / len(settings)


def test_continued_constraint_reads_the_tokens_generated_before():
    requests = [request for request in constrained.requests() if request.constraint is not None]
    with Engine(*constrained.models(), slots=2, **constrained.OPTIONS) as engine:
        whole = engine.generate(requests)
        lengths = [(5 * i) % len(result.tokens) for i, result in enumerate(whole)]
        rest = engine.generate(continued(requests, whole, lengths))
    assert [after.tokens for after in rest] == [
        before.tokens[length:] for before, length in zip(whole, lengths, strict=True)
    ]


def test_complete_or_out_of_vocab_outputs_are_rejected():
    with Engine(toys.tiny_llama(0, 1), **OPTIONS) as engine:
        for request, message in (
            (Request((1,), 3, generated=(VOCAB,)), "ids from 0 to 7"),
            (Request((1,), 3, generated=(-1,)), "ids from 0 to 7"),
            (Request((1,), 3, generated=(1, 2, 3)), "already complete"),
            (Request((1,), 3, eos_ids=(2,), generated=(1, 2)), "one of eos_ids"),
            (Request((1,) * LONGEST, 1000, generated=(1, 2)), "use a larger max_length"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.submit(request, print)
