"""Every drafter with every exact rule: joint distribution of three tokens, coupled output, isolation, contract."""

import jax
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES
from support import drafters
from support.matrix import PROMPTS, SETTINGS, check_texts, pair, ragged, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

K = 2


def check_matrix(report, name, draws, rules, batches=None):
    drafter, p_values = drafters.make(name, *pair()), {}
    for rule in rules:
        found = text_p_values(drafter, rule, draws, K, batches)
        p_values |= {(rule, *where): p for where, p in found.items()}
    check_texts(report, p_values, draws, len(drafters.NAMES))


# By default, test one of each kind: a table, a head, a nested cascade. Those left out also have tests of their own.
SLOW_LAW = {*drafters.HEADS, "eagle", "combined heads", "unigram", "cascade of exits", "nested cascade", "horizontal"}
SLOW_TEXT = {*drafters.HEADS, "eagle", "eagle 3", "unigram", "cascade", "cascade of exits", "mixture", "horizontal"}


def names(slow):
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in drafters.NAMES]


@pytest.mark.parametrize("name", names(slow=SLOW_LAW))
def test_three_tokens_have_target_joint_distribution(report, name):
    """This holds in a ragged batch, under one of two rules. The slow test leaves out nothing.

    Coupled output equals plain decoding, in a batch or alone. The test after the slow one checks this for every
    drafter, token for token.
    """
    check_matrix(report, name, 8_192, [("block", "rejection")[drafters.NAMES.index(name) % 2]])


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters.NAMES)
def test_three_tokens_have_target_joint_distribution_at_length(report, name):
    """This also holds in a larger batch, and for each setting alone on the longest prompt."""
    alone = [([PROMPTS[2]], [settings]) for settings in SETTINGS]
    check_matrix(report, name, 200_000, RULES, [*alone, ragged(len(PROMPTS))])


def check_coupled(report, toy, prompts, name, requests, lengths, alone=()):
    """Check that output in a batch equals plain decoding, and that rows in `alone` have the same drafts alone."""
    tokens, sizes, keys = prompts([1 + i % 9 for i in range(requests)])
    common, options = {"max_new_tokens": 64, "accept": "coupled"}, drafters.every_parameter(requests, 61)
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    plain = jspec.generate(target, tokens, sizes, keys, max_new_tokens=64, **options)
    drafter, different, accepted = drafters.make(name, target, draft), 0, []
    for k in lengths:
        out = drafters.generate(target, drafter, (tokens, sizes, keys), num_draft_tokens=k, **common, **options)
        different += (out.tokens != plain.tokens).any(1).sum()
        accepted.append(out.stats.accepted.sum() / out.stats.drafted.sum())
        for row in alone:
            rows = slice(row, row + 1)
            one = drafters.generate(
                target,
                drafter,
                [part[rows] for part in (tokens, sizes, keys)],
                num_draft_tokens=k,
                **common,
                **drafters.of_rows(options, rows),
            )
            np.testing.assert_array_equal(one.tokens[0], out.tokens[row])
            np.testing.assert_array_equal(one.stats.accepted_at[0], out.stats.accepted_at[row])
    report(
        texts=requests * len(lengths),
        tokens=int(plain.lengths.sum()) * len(lengths),
        different=different,
        alone=len(alone),
        accepted=[f"{rate:.2f}" for rate in accepted],
    )
    assert different == 0
    assert min(accepted) > 0


@pytest.mark.parametrize("name", names(slow=SLOW_TEXT))
def test_coupled_output_equals_plain_decoding_alone_and_in_batch(report, toy, prompts, name):
    check_coupled(report, toy, prompts, name, 50, (3,), alone=range(5, 13))


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters.NAMES)
def test_coupled_output_equals_plain_decoding_at_length(report, toy, prompts, name):
    check_coupled(report, toy, prompts, name, 500, (1, 3, 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", drafters.NAMES)
def test_output_is_same_alone_and_in_batch(report, toy, prompts, name):
    """This holds under rejection, whose drafting and verification each have their own noise."""
    tokens, lengths, keys = prompts([9, 1, 5, 3, 7])
    target, draft = (toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1))
    drafter, options = drafters.make(name, target, draft), {"max_new_tokens": 24, "num_draft_tokens": 3}
    together = drafters.generate(target, drafter, (tokens, lengths, keys), **options)
    for row in range(len(lengths)):
        alone = drafters.generate(target, drafter, [part[row : row + 1] for part in (tokens, lengths, keys)], **options)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_array_equal(alone.stats.accepted_at[0], together.stats.accepted_at[row])
    report(requests=len(lengths), tokens=int(together.lengths.sum()), accepted=int(together.stats.accepted.sum()))


# These contain the others: a model, an early exit, both tables and a cascade are parts of them.
CONTAINING = ("ngram", "unigram", "retrieval", "fallback", "mixture", "nested cascade", "cascade of exits")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(pytest.param(name, "block", marks=[] if name in CONTAINING else pytest.mark.slow) for name in drafters.NAMES),
        ("model", jspec.Lenient(0.5)),
    ],
)
def test_drafter_keeps_contract_with_64_bit_types_enabled(toy, prompts, name, rule):
    tokens, lengths, keys = prompts([4, 1])
    target = toy(0, num_hidden_layers=2)
    drafter = drafters.make(name, target, toy(1))
    with jax.enable_x64(True), jax.enable_checks(True):
        batch = tokens.astype(np.int64), lengths, keys
        out = drafters.generate(target, drafter, batch, max_new_tokens=4, num_draft_tokens=2, accept=rule)
    np.testing.assert_array_equal(out.lengths, 4)
