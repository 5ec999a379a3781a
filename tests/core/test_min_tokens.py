"""`min_tokens`: the distribution without an early EOS, by enumeration, and a minimum above the limit."""

import functools

import jax
import numpy as np
import pytest

import jspec
from support import drafters, oracle, toys
from support.law import NUM_TOKENS, VOCAB, exact_law
from support.oracle import ALPHA

pytestmark = pytest.mark.usefixtures("quick_compile")
PROMPTS, FEWEST, EOS = ((6, 1, 6, 1), (5,), (4, 4, 0, 4)), (0, 1, 2), (1, 6)
DRAWS = 16_384
TREE = jspec.Tree.branching((2, 1))


@functools.cache
def pair():
    target = toys.tiny_llama(10)
    return target, toys.tiny_llama(11, 1, related_to=target)


@functools.cache
def law(prompt, fewest):
    """Return ``float64[512]``; an output that ends early is padded with token 0, which is `pad_id`."""

    def bias(text):
        return np.where(np.isin(np.arange(VOCAB), EOS) & (len(text) < fewest), -np.inf, 0)

    return exact_law(pair()[0], prompt, {}, bias, EOS)


@functools.partial(jax.jit, static_argnames=("rule", "k"))
def counts(target, drafter, keys, fewest, rule, k):
    """Return ``int[3, 512]``: counts of each prompt's outputs under ``keys[N, 3]``."""
    tokens = np.zeros((3, 4), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    copies = len(keys)
    batch = np.tile(tokens, (copies, 1)), np.tile([4, 1, 4], copies), keys.ravel()
    options = {"max_new_tokens": NUM_TOKENS, "sampling": jspec.SamplingParams(min_tokens=fewest), "eos_ids": EOS}
    options |= {} if k is None else {"num_draft_tokens": k}
    out = jspec.speculative_generate(target, drafter, *batch, accept=rule, **options)
    texts = (out.tokens @ np.asarray([VOCAB**2, VOCAB, 1])).reshape(keys.shape)
    rows = np.broadcast_to(np.arange(3), texts.shape)
    return jax.numpy.zeros((3, VOCAB**NUM_TOKENS), np.int32).at[rows, texts].add(1)


@pytest.mark.parametrize(
    ("rule", "k", "tree"),
    [
        ("rejection", 2, None),
        ("coupled", jspec.UpTo(2), None),
        ("traversal", None, TREE),
        pytest.param("block", jspec.UpTo(4), None, marks=pytest.mark.slow),
        pytest.param("rejection", None, TREE, marks=pytest.mark.slow),
    ],
)
def test_min_tokens_gives_distribution_without_early_eos(report, rule, k, tree):
    """Three rows of one batch, with at least 0, 1 and 2 tokens before EOS, follow their own distributions."""
    target, draft = pair()
    drafter = draft if tree is None else jspec.TreeDrafter(draft, tree)
    found = counts(target, drafter, jax.random.split(jax.random.key(0), (DRAWS, 3)), np.tile(FEWEST, DRAWS), rule, k)
    p_values = [
        oracle.p_value(np.asarray(row), law(prompt, fewest))
        for row, prompt, fewest in zip(found, PROMPTS, FEWEST, strict=True)
    ]
    report(
        settings=3,
        texts_each=DRAWS,
        min_p=f"{min(p_values):.2g}",
        sees_tv=f"{oracle.detectable(DRAWS, VOCAB**NUM_TOKENS - 1, ALPHA / 3):.3f}",
    )
    assert min(p_values) * 3 > ALPHA


def test_min_tokens_above_limit_decodes_to_limit(prompts):
    target, draft = pair()
    options = {"num_draft_tokens": 3, "sampling": jspec.SamplingParams(min_tokens=[50, 0]), "eos_ids": EOS}
    out = drafters.generate(target, draft, prompts([3, 4], vocab_size=VOCAB), max_new_tokens=40, **options)
    assert out.lengths[0] == 40 and not np.isin(out.tokens[0], EOS).any()
    assert out.lengths[1] < 40


def test_raw_logprobs_ignore_min_tokens(prompts):
    """Raw log-probabilities are the model's own. The masked distribution's are higher, as it has fewer tokens."""
    target, _ = pair()
    out = jspec.generate(
        target,
        *prompts([3], vocab_size=VOCAB),
        max_new_tokens=8,
        eos_ids=EOS,
        sampling=jspec.SamplingParams(min_tokens=8),
    )
    assert (np.asarray(out.logprobs) > np.asarray(out.raw_logprobs) + 1e-3).all()
