"""pass@k equals an enumeration of all subsets, and rejects invalid arguments."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.evaluation import pass_at_k


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_estimate_is_the_share_of_subsets_with_a_correct_sample(size):
    """Every number of correct samples and every k, against all subsets of k samples."""
    groups = np.arange(size)[None] < np.arange(size + 1)[:, None]
    for k in range(1, size + 1):
        expected = [np.mean([any(some) for some in itertools.combinations(row, k)]) for row in groups.tolist()]
        found = pass_at_k(groups, k)
        assert found.shape == (size + 1,) and found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)
        assert found[0] == 0 and found[-1] == 1


def test_order_of_samples_and_kind_of_array_do_not_matter():
    groups = np.random.default_rng(0).random((4, 9)) < 0.3
    expected = pass_at_k(groups, 3)
    np.testing.assert_array_equal(pass_at_k(jnp.asarray(groups[:, ::-1]), np.int32(3)), expected)
    np.testing.assert_array_equal(pass_at_k(groups.tolist(), 3), expected)


def test_large_groups_do_not_overflow():
    """C(20000, 100) exceeds the largest float; with one correct sample, the estimate is k / G."""
    groups = np.zeros((2, 20_000), bool)
    groups[0, 7] = groups[1, :10_000] = True
    np.testing.assert_allclose(pass_at_k(groups, 100), [100 / 20_000, 1.0], rtol=1e-12)


def test_estimate_is_unbiased():
    """The mean over all outcomes of G samples, weighted by probability, is the pass@k of independent samples."""
    outcomes, p = np.array([*itertools.product([False, True], repeat=8)]), 0.3
    weights = np.prod(np.where(outcomes, p, 1 - p), axis=1)
    for k in (1, 3, 8):
        assert pass_at_k(outcomes, k) @ weights == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(
    ("correct", "k", "message"),
    [
        ([True, False], 1, r"correct has shape \[2\]; pass one row per prompt and one column per sample"),
        (np.zeros((2, 0), bool), 1, r"correct has shape \[2, 0\]"),
        ([[1, 0]], 1, "correct has dtype int64; pass booleans, such as scores == 1"),
        ([[True, False]], 3, "k is 3, but each prompt has 2 samples; pass an integer from 1 to 2"),
        ([[True, False]], 0, "k is 0, but each prompt has 2 samples"),
        ([[True, False]], 1.0, "k is 1.0, but each prompt has 2 samples"),
        ([[True, False]], True, "k is True, but each prompt has 2 samples"),
    ],
)
def test_invalid_arguments_are_rejected(correct, k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(correct, k)
