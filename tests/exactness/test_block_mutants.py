"""Planted bugs in block drafters. Each one might be shipped, and each one is caught.

A wrong distribution, or a drawn token that is discarded, biases the output. The distribution of three tokens shows it.
A wrong key, feature or position only costs acceptance, and the output stays exact. The PyTorch reference, or the
comparison of the cache with the target's states, shows it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from convert.heads.block.config import MarkovConfig
from jspec.drafters import BlockDrafter
from support import block_checks, block_mutants, blocks, heads, mutant_checks, oracle, toys
from support.few import by_default

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

IN_LAWS = (
    block_mutants.q_of_rows_without_a_draft,
    block_mutants.q_without_the_correction,
    block_mutants.confidence_of_the_token_itself,
    block_mutants.confidence_one_row_ahead,
)
IN_REFERENCE = (
    block_mutants.features_one_layer_off,
    block_mutants.positions_by_row,
    block_mutants.positions_of_the_first_sequence,
)
IN_CACHE = (block_mutants.block_keys_kept,)


@pytest.fixture(autouse=True)
def traced_anew():
    """Clear caches, so that earlier programs do not hide a patched function and later ones do not contain it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


def law(rule="rejection"):
    """Return the p-value of three tokens, and what was seen. Drafts end when another token would not pay off."""
    target = heads.markov_llama(np.asarray(toys.markov_pair(7)[0].table))
    details = {"markov": MarkovConfig("vanilla", 4), "confidence": "state and token", "drafts_from_first": True}
    block = blocks.block(target, num_layers=1, own_head=True, **details)
    block.confidence_head.bias.set_value(jnp.full(1, 0.5))
    length = jspec.ByEstimatedAcceptance(2, 0.3)
    return mutant_checks.law({}, drafter=BlockDrafter(block), target=target, length=length, rule=rule)


def cache_error(prompts):
    target = toys.tiny_llama(0, 3)
    block, batch = blocks.block(target), prompts([5, 1, 3, 9], vocab_size=8)
    return block_checks.cache_error(target, BlockDrafter(block), block, lambda state: state, batch, 4, "rejection")[0]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_distribution_of_correct_code_raises_no_alarm(report, rule):
    p, seen = law(rule)
    report(seen=seen)
    assert p > oracle.ALPHA


@pytest.mark.parametrize("mutant", by_default(IN_LAWS, ()))
def test_distribution_catches_planted_bug(report, monkeypatch, mutant):
    mutant(monkeypatch.setattr)
    p, seen = law()
    report(seen=seen, alpha=oracle.ALPHA)
    assert p < oracle.ALPHA


@pytest.mark.parametrize("mutant", by_default(IN_REFERENCE, IN_REFERENCE[:1]))
def test_reference_catches_planted_bug(report, monkeypatch, tmp_path, mutant):
    pytest.importorskip("torch")
    mutant(monkeypatch.setattr)
    error = block_checks.reference_error(tmp_path / "drafter", "deepspec vanilla")
    report(error=error)
    assert error > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_CACHE)
def test_cache_catches_planted_bug(report, monkeypatch, prompts, mutant):
    assert cache_error(prompts) < 2e-5
    mutant(monkeypatch.setattr)
    jax.clear_caches()
    error = cache_error(prompts)
    report(error=error)
    assert error > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("mutant", IN_REFERENCE[1:] + IN_CACHE)
def test_bug_that_costs_only_acceptance_is_exact(report, monkeypatch, mutant):
    mutant(monkeypatch.setattr)
    p, seen = law()
    report(seen=seen)
    assert p > oracle.ALPHA
