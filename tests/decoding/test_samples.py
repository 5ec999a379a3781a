"""Several samples of each prompt: each prompt is prefilled once, and the output equals that of repeated prompts."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec.core.sampling import SamplingParams
from support import drafters, toys
from support.matrix import PROMPTS

pytestmark = pytest.mark.usefixtures("quick_compile")
SAMPLES, NEW = 3, 10


@pytest.fixture(scope="module")
def pair():
    target = toys.tiny_llama(10)
    return target, toys.tiny_llama(11, 1, related_to=target)


def prompts(samples=1, count=3):
    tokens = np.zeros((count, 6), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=False):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in PROMPTS[:count]])
    keys = jax.random.split(jax.random.key(1), count * SAMPLES)
    return np.repeat(tokens, samples, axis=0), np.repeat(lengths, samples), keys


def assert_same_output(one, other):
    for leaf, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["none", *drafters.NAMES, *drafters.TREE_NAMES])
def test_samples_are_those_of_repeated_prompts(pair, name):
    """Every sampling parameter, limit and EOS id differs by row."""
    target, draft = pair
    options = drafters.every_parameter(3 * SAMPLES, target.config.vocab_size) | {"max_new_tokens": NEW}
    if name == "none":
        expected = jspec.generate(target, *prompts(SAMPLES), **options)
        found = jspec.generate(target, *prompts(), samples_per_prompt=SAMPLES, **options)
    else:
        drafter = drafters.make(name, target, draft)
        options |= {"record": True} | ({} if name in drafters.TREE_NAMES else {"num_draft_tokens": 3})
        expected = jspec.speculative_generate(target, drafter, *prompts(SAMPLES), **options)
        found = jspec.speculative_generate(target, drafter, *prompts(), samples_per_prompt=SAMPLES, **options)
    assert found.tokens.shape == (3 * SAMPLES, NEW)
    assert_same_output(found, expected)


@pytest.mark.parametrize("rule", ["block", "coupled", "traversal", "k-seq"])
def test_every_rule_gives_the_samples_of_repeated_prompts(pair, rule):
    target, draft = pair
    if rule != "block":
        draft = jspec.TreeDrafter(draft, jspec.Tree.branching((2, 1)), replacement=rule == "k-seq")
    options = {"max_new_tokens": NEW, "accept": rule}
    expected = jspec.speculative_generate(target, draft, *prompts(SAMPLES), **options)
    assert_same_output(
        jspec.speculative_generate(target, draft, *prompts(), samples_per_prompt=SAMPLES, **options), expected
    )


def test_samples_inside_jit_and_with_varying_lengths(pair):
    target, draft = pair
    options = {"max_new_tokens": NEW, "num_draft_tokens": jspec.WhileConfident(3, 0.3, 0.3)}

    @jax.jit
    def run(target, draft, *request):
        return jspec.speculative_generate(target, draft, *request, samples_per_prompt=SAMPLES, **options)

    expected = jspec.speculative_generate(target, draft, *prompts(SAMPLES), **options)
    assert_same_output(run(target, draft, *prompts()), expected)


def test_each_prompt_is_prefilled_once(report):
    """Compare the operations of a program that does little more than prefill."""
    target = toys.tiny_llama(10)
    tokens, counts = np.ones((2, 64), np.int32), []
    for samples, rows in ((8, 1), (1, 8)):
        batch = np.repeat(tokens, rows, axis=0), np.full(2 * rows, 64), jax.random.split(jax.random.key(0), 16)

        def run(target, *batch, samples=samples):
            return jspec.generate(target, *batch, max_new_tokens=1, samples_per_prompt=samples)

        counts.append(jax.jit(run).lower(target, *batch).compile().cost_analysis()["flops"])
    report(flops_over_rows=f"{counts[0] / counts[1]:.3f}")
    assert counts[0] < counts[1] / 4


def test_complete_returns_the_samples_of_each_prompt():
    target, draft, tokenizer = jspec.demo_pair()
    texts = ["def main():", "import os"]
    options = {"max_new_tokens": 12, "seed": 5, "sampling": SamplingParams(), "accept": "coupled"}
    found = jspec.complete(target, draft, tokenizer, texts, samples_per_prompt=SAMPLES, **options)
    repeated = [text for text in texts for _ in range(SAMPLES)]
    expected = jspec.complete(target, draft, tokenizer, repeated, **options)
    assert [one.prompt for one in found] == repeated
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert len({one.text for one in found[:SAMPLES]}) == SAMPLES


def test_automatic_draft_length_is_measured_for_all_rows(pair, monkeypatch):
    target, draft = pair
    seen = []
    monkeypatch.setattr("jspec.generation.generate.best_number", lambda *arguments: seen.append(arguments[2]) or 2)
    options = {"max_new_tokens": NEW, "num_draft_tokens": "auto", "samples_per_prompt": SAMPLES}
    jspec.speculative_generate(target, draft, *prompts(), **options)
    assert seen[0].tokens.shape == (3 * SAMPLES, 6) and seen[0].lengths.shape == seen[0].keys.shape == (3 * SAMPLES,)


MISTAKES = {
    "keys": (
        {"samples_per_prompt": 4},
        r"^keys has shape \(9,\); expected \(12,\), one key for each row of the output",
    ),
    "zero": ({"samples_per_prompt": 0}, "^samples_per_prompt must be a Python int of at least 1"),
    "fraction": ({"samples_per_prompt": 1.5}, "^samples_per_prompt must be a Python int of at least 1"),
    "sampling": ({"sampling": SamplingParams(temperature=[1.0, 0.5, 0.0])}, r"list or array of shape \[9\]"),
    "eos_ids": ({"eos_ids": np.zeros((3, 1), int)}, r"or an array of shape \[9, n\]"),
    "too long": (
        {"sampling": SamplingParams(max_tokens=[1] * 8 + [0]), "max_new_tokens": 5000},
        "^Prompt 2 of 4 tokens",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(pair, mistake):
    options, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        jspec.generate(pair[0], *prompts(), **{"samples_per_prompt": SAMPLES, "max_new_tokens": NEW} | options)


def test_drafter_without_rows_is_rejected(pair):
    class Shared(jspec.UnigramDrafter):
        def init(self, tokens, num_slots, signals=None):
            return np.zeros(5, np.float32)

    Shared = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(Shared))
    drafter = Shared(*jax.tree.leaves(jspec.UnigramDrafter.from_tokens(np.arange(8), 8)))
    with pytest.raises(ValueError, match="Shared keeps state that does not have one row per prompt"):
        jspec.speculative_generate(pair[0], drafter, *prompts(), max_new_tokens=NEW, samples_per_prompt=SAMPLES)
