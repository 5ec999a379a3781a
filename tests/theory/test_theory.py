"""`jspec.theory` matches the papers' own numbers, brute force, and simulated speculative decoding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec import theory

ROUNDS = 200_000
RATES = st.floats(0.0, 1.0)
COSTS = st.floats(0.0, 2.0)
DRAFTS = st.integers(0, 40)


def _random_rows(seed, *shape):
    """Return float64 distributions over the last axis."""
    return np.random.default_rng(seed).dirichlet(np.full(shape[-1], 0.7), size=shape[:-1])


def _draw(rng, rows):
    """Draw one token from each distribution in `rows` [N, V], by inverting its CDF."""
    return (rng.random((len(rows), 1)) > np.cumsum(rows, axis=-1)).sum(-1).clip(max=rows.shape[-1] - 1)


def _simulate_rounds(p, q, k, seed=0):
    """Return the drafts accepted in each round of algorithm 1 for bigram models `p` and `q` [V, V] after token 0."""
    rng = np.random.default_rng(seed)
    context, alive, accepted = np.zeros(ROUNDS, int), np.ones(ROUNDS, bool), np.zeros(ROUNDS, int)
    for _ in range(k):
        token = _draw(rng, q[context])
        alive &= rng.random(ROUNDS) * q[context, token] < p[context, token]
        accepted += alive
        context = token
    return accepted


def _within_noise(samples, expected):
    """Return whether `samples` average to `expected` within four standard errors: one false alarm in 16,000."""
    return abs(samples.mean() - expected) < 4 * samples.std() / np.sqrt(len(samples))


def _unigram(row):
    """Return a bigram table that ignores its context, which makes the positions independent."""
    return np.tile(row, (len(row), 1))


# The papers' own numbers


@pytest.mark.parametrize(
    ("alpha", "k", "growth", "gain"),
    [
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_values_match_leviathan_table_1(alpha, k, growth, gain):
    assert round(theory.operations(alpha, k, 0.0), 2) == growth
    assert round(theory.speedup(alpha, k, 0.0), 2) == gain


def test_values_quoted_in_papers_are_reproduced():
    assert round(theory.speedup(0.2, 3, 0.0), 2) == 1.25  # Leviathan et al., section 3.6: a bigram draft
    assert theory.expected_tokens(0.8, 10) > 4  # Stratos, section 1.1.1


def test_hand_computed_values():
    p, q = [0.5, 0.3, 0.2], [0.1, 0.3, 0.6]
    assert theory.acceptance_rate(p, q) == pytest.approx(0.6)
    assert theory.divergence(p, q) == pytest.approx(0.4)
    assert theory.expected_tokens(0.5, 3) == 1.875
    assert theory.expected_tokens_from_rates([0.5, 0.2, 0.0, 1.0]) == pytest.approx(1.6)
    assert theory.speedup(0.5, 3, 0.25) == 1.875 / 1.75
    assert theory.operations(0.5, 3, 0.25) == 4.75 / 1.875
    assert theory.speedup_lower_bound(0.5, 0.25) == 1.2
    assert theory.speedup_lower_bound(0.2, 0.25) == 1.0


# Simulation


def test_acceptance_rate_matches_simulated_draws():
    p, q = _random_rows(1, 6), _random_rows(2, 6)
    accepted = _simulate_rounds(_unigram(p), _unigram(q), k=1)
    assert _within_noise(accepted, theory.acceptance_rate(p, q))


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_expected_tokens_match_simulation_and_detect_off_by_one(k):
    p = _random_rows(3, 6)
    q = 0.7 * p + 0.3 * _random_rows(4, 6)
    alpha = theory.acceptance_rate(p, q)
    tokens = 1 + _simulate_rounds(_unigram(p), _unigram(q), k)
    assert _within_noise(tokens, theory.expected_tokens(alpha, k))
    # The check is sharp enough to distinguish k from one draft more or fewer.
    assert not _within_noise(tokens, theory.expected_tokens(alpha, k - 1))
    assert not _within_noise(tokens, theory.expected_tokens(alpha, k + 1))


def test_speedup_and_operations_match_simulated_costs():
    k, c, c_hat = 3, 0.1, 0.05
    p, q = _random_rows(5, 6), _random_rows(6, 6)
    alpha = theory.acceptance_rate(p, q)
    tokens = 1 + _simulate_rounds(_unigram(p), _unigram(q), k)
    seconds, arithmetic = k * c + 1, k * c_hat + k + 1
    assert _within_noise(tokens / seconds, theory.speedup(alpha, k, c))
    assert _within_noise(tokens / arithmetic, 1 / theory.operations(alpha, k, c_hat))


def test_conditional_rates_predict_dependent_positions():
    """The bigram draft is perfect only after token 1, so surviving rounds tend to have passed through that token."""
    p, q, k = _random_rows(7, 3, 3), _random_rows(8, 3, 3), 5
    p[1] = q[1]
    # alive[x] is the chance that every draft so far was accepted and that the last one is x.
    alive, survival = np.array([1.0, 0.0, 0.0]), [1.0]
    for _ in range(k):
        alive = alive @ np.minimum(p, q)
        survival.append(alive.sum())
    rates = np.divide(survival[1:], survival[:-1])
    tokens = 1 + _simulate_rounds(p, q, k)
    assert _within_noise(tokens, theory.expected_tokens_from_rates(rates))
    assert not _within_noise(tokens, theory.expected_tokens(rates.mean(), k))


# Identities and limits


def test_acceptance_and_divergence_are_symmetric_and_sum_to_one():
    p, q = _random_rows(9, 5, 4, 11), _random_rows(10, 5, 4, 11)
    assert theory.acceptance_rate(p, q).shape == (5, 4)
    np.testing.assert_allclose(theory.acceptance_rate(p, q), 1 - theory.divergence(p, q), rtol=0, atol=1e-14)
    np.testing.assert_array_equal(theory.divergence(p, q), theory.divergence(q, p))


def test_equal_and_disjoint_distributions():
    p = np.full(7, 1 / 7, np.float32)
    assert theory.acceptance_rate(p, p) == pytest.approx(1.0, abs=1e-15)
    assert theory.divergence(p, p) == 0.0
    assert theory.acceptance_rate([0.3, 0.7, 0, 0], [0, 0, 0.6, 0.4]) == 0.0
    assert theory.divergence([0.3, 0.7, 0, 0], [0, 0, 0.6, 0.4]) == 1.0


@pytest.mark.parametrize("scale", [0.99992, 1.00008])
def test_rows_that_sum_only_roughly_to_one_are_normalised(scale):
    p = np.array([0.25, 0.75])
    assert theory.expected_tokens(theory.acceptance_rate(p * scale, p), 4) == pytest.approx(5, rel=1e-14)


def test_expected_tokens_limits_are_exact():
    k = np.arange(50)
    np.testing.assert_array_equal(theory.expected_tokens(1.0, k), k + 1)
    np.testing.assert_array_equal(theory.expected_tokens(0.0, k), 1)
    np.testing.assert_array_equal(theory.expected_tokens(np.linspace(0, 1, 9), 0), 1)


@pytest.mark.parametrize("gap", [1e-4, 1e-8, 1e-12, 2.0**-53])
def test_expected_tokens_keep_full_precision_near_one(gap):
    # Binomial expansion of (1 - (1 - gap)^(k+1)) / gap to the order that float64 can see.
    n = 9
    series = n - n * (n - 1) / 2 * gap + n * (n - 1) * (n - 2) / 6 * gap**2
    assert theory.expected_tokens(1 - gap, n - 1) == pytest.approx(series, rel=1e-9 if gap > 1e-6 else 1e-14)


@given(RATES.filter(lambda alpha: alpha < 0.99), DRAFTS)
def test_expected_tokens_equal_equation_1(alpha, k):
    assert theory.expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), rel=1e-12)


@given(RATES, DRAFTS)
def test_equal_conditional_rates_reduce_to_equation_1(alpha, k):
    assert theory.expected_tokens_from_rates(np.full(k, alpha)) == pytest.approx(theory.expected_tokens(alpha, k))


@given(RATES, RATES, DRAFTS, COSTS)
def test_higher_acceptance_rate_never_hurts(one, other, k, c):
    low, high = sorted([one, other])
    assert 1 <= theory.expected_tokens(low, k) <= theory.expected_tokens(high, k) <= k + 1
    assert theory.speedup(low, k, c) <= theory.speedup(high, k, c)
    assert theory.operations(low, k, c) >= theory.operations(high, k, c) >= 1


@given(RATES, DRAFTS)
def test_more_draft_tokens_help_with_diminishing_returns(alpha, k):
    fewer, here, more = theory.expected_tokens(alpha, np.arange(k, k + 3))
    assert fewer <= here <= more
    assert more - here <= here - fewer + 1e-13


# The best k


@given(RATES, COSTS, st.integers(0, 30))
def test_optimal_k_beats_every_other_k(alpha, c, max_k):
    best = theory.optimal_k(alpha, c, max_k=max_k)
    assert isinstance(best, int)
    assert 0 <= best <= max_k
    tolerance = 1 + 1e-14
    assert all(theory.speedup(alpha, k, c) <= theory.speedup(alpha, best, c) * tolerance for k in range(max_k + 1))


@given(RATES, COSTS)
def test_speculation_pays_only_if_alpha_exceeds_cost(alpha, c):
    best = theory.optimal_k(alpha, c)
    assert best == 0 or alpha > c
    assert theory.speedup(alpha, best, c) >= theory.speedup_lower_bound(alpha, c)


def test_optimal_k_known_points():
    assert theory.optimal_k(0.8, 0.05) == max(range(65), key=lambda k: theory.speedup(0.8, k, 0.05))
    assert theory.optimal_k(1.0, 0.5) == 64
    assert theory.optimal_k(0.3, 0.3) == theory.optimal_k(1.0, 1.0) == theory.optimal_k(0.0, 0.0) == 0
    assert theory.optimal_k(0.99, 0.0, max_k=7) == 7
    assert theory.optimal_k(0.9, 0.1, max_k=0) == 0


def test_functions_work_elementwise_over_arrays():
    alpha, c, k = (
        np.linspace(0, 1, 7)[:, None],
        np.array([0.0, 0.05, 0.5]),
        np.array([[0], [1], [2], [3], [4], [5], [9]]),
    )
    best, gain, growth = (
        theory.optimal_k(alpha, c),
        theory.speedup(alpha, k, c),
        theory.operations(alpha, k, c),
    )
    for i, j in np.ndindex(7, 3):
        row = float(alpha[i, 0]), int(k[i, 0]), float(c[j])
        assert best[i, j] == theory.optimal_k(row[0], row[2])
        assert gain[i, j] == theory.speedup(*row)
        assert growth[i, j] == theory.operations(*row)
    rates = _random_rows(11, 4, 6)
    rowwise = [theory.expected_tokens_from_rates(row) for row in rates]
    np.testing.assert_array_equal(theory.expected_tokens_from_rates(rates), rowwise)


# Bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.acceptance_rate([0.5, 0.5], [1.0]), "p has shape .* and q has shape"),
        (lambda: theory.acceptance_rate(1.0, 1.0), r"expected \[..., V\]"),
        (lambda: theory.divergence([0.5, 0.6], [0.5, 0.5]), "p has a row whose sum is off by 0.1"),
        (lambda: theory.divergence([1.0, 0.0], [1.5, -0.5]), "q has a negative"),
        (lambda: theory.acceptance_rate([np.nan, 1.0], [0.5, 0.5]), "p has a negative or non-finite"),
        (lambda: theory.expected_tokens(1.2, 3), "alpha is 1.2; expected a rate"),
        (lambda: theory.expected_tokens(np.nan, 3), "alpha is nan"),
        (lambda: theory.expected_tokens(0.5, -1), "k is -1; expected an integer"),
        (lambda: theory.expected_tokens(0.5, 2.5), "k has dtype float64"),
        (lambda: theory.expected_tokens([0.5, 0.6], [1, 2, 3]), r"broadcast \(alpha \(2,\), k \(3,\)\)"),
        (lambda: theory.expected_tokens_from_rates([0.5, -0.1]), "rates is -0.1"),
        (lambda: theory.expected_tokens_from_rates(0.5), "rates is a scalar"),
        (lambda: theory.speedup(0.5, 1, -0.1), "c is -0.1; expected a finite ratio"),
        (lambda: theory.speedup_lower_bound(0.5, np.nan), "c is nan"),
        (lambda: theory.operations(0.5, 1, np.inf), "c_hat is inf"),
        (lambda: theory.optimal_k(0.5, 0.1, max_k=-1), "max_k is -1"),
        (lambda: theory.optimal_k(-0.5, 0.1), "alpha is -0.5"),
    ],
)
def test_bad_input_is_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()
