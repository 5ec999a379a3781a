"""Every drafter that drafts its own trees, with every tree rule: distribution, coupled output, isolation, contract."""

import jax
import numpy as np
import pytest

import jspec
from jspec.drafters.draft_length import DEFAULT
from support import drafters
from support.matrix import check_texts, pair, ragged, text_p_values

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

NAMES, RULES = drafters.TREE_NAMES, ("rejection", "traversal", "coupled")
# Recycling remembers more than the others. `test_own_trees` compares each drafter with a plain implementation.
FEW = [pytest.param(name, marks=[] if name == "recycling" else pytest.mark.slow) for name in NAMES]


def check_law(report, name, draws, rules, batches=None):
    drafter, found = drafters.make(name, *pair()), {}
    for rule in rules:
        values = text_p_values(drafter, rule, draws, DEFAULT, batches)
        found |= {(rule, *where): p for where, p in values.items()}
    check_texts(report, found, draws, len(NAMES))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_three_tokens_have_target_joint_distribution(report, name):
    check_law(report, name, 8_192, ["rejection"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_three_tokens_have_target_joint_distribution_at_length(report, name):
    alone = [([ragged(3)[0][2]], [settings]) for settings in ragged(3)[1]]
    check_law(report, name, 200_000, RULES, [*alone, ragged(5)])


def check_alone(name, models, batch, together, rows, options):
    """Check output and counts: nothing that is remembered about one request reaches another."""
    for row in rows:
        one, own = [part[row : row + 1] for part in batch], options | drafters.of_rows(options, slice(row, row + 1))
        alone = drafters.generate(models[0], drafters.make(name, *models), one, **own)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_array_equal(alone.stats.accepted_at[0], together.stats.accepted_at[row])


def check_coupled(report, toy, prompts, name, requests, alone):
    """Check that the output equals plain decoding, in fewer rounds."""
    batch, options = prompts([1 + i % 9 for i in range(requests)]), drafters.every_parameter(requests, 61)
    models = [toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1)]
    options |= {"max_new_tokens": 64}
    plain = jspec.generate(models[0], *batch, **options)
    options |= {"accept": "coupled"}
    out = drafters.generate(models[0], drafters.make(name, *models), batch, **options)
    different = int((out.tokens != plain.tokens).any(1).sum())
    report(
        texts=requests,
        tokens=int(plain.lengths.sum()),
        different=different,
        tokens_a_round=f"{out.lengths.sum() / out.stats.rounds.sum():.2f}",
    )
    assert different == 0
    assert out.stats.rounds.sum() < plain.stats.rounds.sum()
    check_alone(name, models, batch, out, alone, options)


@pytest.mark.parametrize("name", FEW)
def test_coupled_output_equals_plain_decoding_alone_and_in_batch(report, toy, prompts, name):
    check_coupled(report, toy, prompts, name, 20, range(5, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_coupled_output_equals_plain_decoding_at_length(report, toy, prompts, name):
    check_coupled(report, toy, prompts, name, 500, range(8))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize("name", NAMES)
def test_output_is_same_alone_and_in_batch(toy, prompts, name, rule):
    batch, models = prompts([9, 1, 5]), [toy(0, distance=distance, num_hidden_layers=2) for distance in (0, 0.1)]
    options = {"max_new_tokens": 24, "accept": rule} | drafters.every_parameter(3, 61)
    together = drafters.generate(models[0], drafters.make(name, *models), batch, **options)
    check_alone(name, models, batch, together, range(3), options)


@pytest.mark.parametrize("name", FEW)
def test_drafter_keeps_contract_with_64_bit_types_enabled(toy, prompts, name):
    tokens, lengths, keys = prompts([4, 1])
    drafter = drafters.make(name, toy(0), toy(1))
    with jax.enable_x64(True), jax.enable_checks(True):
        batch = tokens.astype(np.int64), lengths, keys
        out = drafters.generate(toy(0), drafter, batch, max_new_tokens=4, accept="rejection")
    np.testing.assert_array_equal(out.lengths, 4)
