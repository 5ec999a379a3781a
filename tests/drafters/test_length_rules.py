"""The length that each rule chooses from what earlier rounds drafted and accepted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.drafters.draft_length import compiled_lengths
from jspec.drafters.duck_length import as_draft_length

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")


@pytest.mark.parametrize(
    ("length", "lengths"),
    [
        (jspec.UpTo(8), (0, 8)),
        (jspec.UpTo(1), (0, 1)),
        (jspec.Heuristic(8), (0, 1, 2, 4, 8)),
        (jspec.ByAcceptance(1), (0, 1)),
        (jspec.WhileConfident(3), (0, 1, 2, 3)),
        (jspec.ByEstimatedAcceptance(8), (0, 1, 2, 4, 8)),
        (jspec.WhileConfident(3, first=0.5), (0, 3)),
        (as_draft_length(np.int64(8)), (8,)),
        (as_draft_length(0), (0,)),
    ],
)
def test_few_lengths_are_compiled(length, lengths):
    assert compiled_lengths(length) == lengths


def test_each_row_has_its_own_length():
    length = jspec.Heuristic(8)
    state = length.init(4)
    np.testing.assert_array_equal(state, 4)
    state = length.update(state, jnp.array([4, 4, 4, 0]), jnp.array([4, 3, 0, 0]))
    np.testing.assert_array_equal(state, [6, 3, 3, 4])
    for _ in range(4):
        state = length.update(state, state, state * jnp.array([1, 0, 1, 0]))
    np.testing.assert_array_equal(length.budget(state, 4), [8, 1, 8, 1])


def test_acceptance_leads_to_best_length_by_theory():
    for cost in (0.05, 0.2, 0.5):
        length = jspec.ByAcceptance(8, cost)
        rates = np.array([0.3, 0.6, 0.8, 0.9])
        state = length.init(4)
        for _ in range(200):  # rounds that accept as many tokens as expected at that rate
            state = length.update(state, jnp.full(4, 99.0), jnp.asarray(rates / (1 - rates)))
        found = np.asarray(length.budget(state, 4))
        share = np.asarray((state[0] + 1) / (state[1] + 2))
        best = [max(range(1, 9), key=lambda k: float(jspec.theory.speedup(a, k, cost))) for a in share]
        np.testing.assert_array_equal(found, best)
        weight = 10 / (1 - rates)  # verified draft tokens, including old rounds', plus two that were never drafted
        np.testing.assert_allclose(share, (weight * rates + 1) / (weight + 2), rtol=1e-5)


def test_threshold_adapts_to_acceptance():
    length = jspec.ByConfidence(8, acceptance=0.75)
    state = length.init(5)
    np.testing.assert_allclose(state, 0.4)
    drafted, accepted = jnp.array([4, 4, 4, 1, 0]), jnp.array([4, 3, 0, 1, 0])
    moved = length.update(state, drafted, accepted)  # after the first token: 3 of 3, 2 of 3, and none verified
    np.testing.assert_allclose(moved, 0.4 + np.array([-0.0375, 0.0125, 0, 0, 0]), rtol=1e-6)
    np.testing.assert_array_equal(length.continues(moved, jnp.full(5, 0.4)), [True, False, True, True, True])
    for _ in range(60):
        state = length.update(state, drafted, accepted)
    np.testing.assert_allclose(state, [0, 1, 0.4, 0.4, 0.4], rtol=1e-5)


def test_threshold_converges_to_requested_acceptance(report):
    """Each round draws its own confidence, independent of other rounds, and accepts tokens with that probability."""
    shares, rows, rounds = (0.82, 0.86, 0.9), 16, 4_000  # drafting everything gives 0.776

    def play(state, key):
        luck = jax.random.uniform(key, (len(shares), rows, 9))
        sure, luck = luck[..., 0], luck[..., 1:]
        drafted = jnp.where(sure >= state, 8, 1)
        accepted = jnp.minimum(jnp.cumprod(luck < sure[..., None], axis=-1).sum(-1), drafted)
        played = zip(shares, state, drafted, accepted, strict=True)
        state = jnp.stack([jspec.ByConfidence(8, share).update(*row) for share, *row in played])
        return state, (state, jnp.maximum(accepted - 1, 0), jnp.maximum(accepted + (accepted < drafted) - 1, 0))

    began = jnp.stack([jspec.ByConfidence(8).init(rows)] * len(shares))
    _, (state, accepted, judged) = jax.lax.scan(play, began, jax.random.split(jax.random.key(0), rounds))
    found = np.asarray(accepted.sum((0, 2)) / judged.sum((0, 2)))
    thresholds = np.asarray(state).mean((0, 2))
    report(wanted=shares, found=found.round(3).tolist(), thresholds=thresholds.round(2).tolist())
    np.testing.assert_allclose(found, shares, atol=0.01)
    assert (np.diff(thresholds) > 0.05).all()
