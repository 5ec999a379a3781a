"""The acceptance rule: algebra to 1e-12, a round enumerated to 1e-12, and rows that are not distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.acceptance import RULES, rejection
from jspec.core import keys
from jspec.core.probs import residual, sample
from jspec.core.types import Draft
from support import oracle
from support.accept import PAIRS, algebra_error, degenerate_rows, tables
from support.mutants import in_rules


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_acceptance_and_residual_sum_to_target(report, dtype, tolerance):
    error, threshold_error = algebra_error(dtype)
    report(pairs=PAIRS, max_error=f"{error:.1e}", max_threshold_error=f"{threshold_error:.1e}", tolerance=tolerance)
    assert error <= tolerance
    assert threshold_error <= tolerance


def enumerate_round(rng, vocab_size, k):
    """Return a round's largest errors on prefix-dependent tables: in its prefixes and in the joint distribution."""
    p_tables, _, draft, target_probs = tables(rng, vocab_size, k)
    paths = np.asarray(draft.tokens)
    thresholds = oracle.acceptance_thresholds(lambda u: np.asarray(path_accepts(u, draft, target_probs)), paths.shape)
    drawn = np.take_along_axis(np.asarray(draft.probs), paths[..., None], -1)[..., 0]

    reach, joint, autoregressive = np.ones(1), np.ones(1), np.ones(1)
    errors = [0.0]
    for n in range(k + 1):
        first = np.arange(vocab_size**n) * vocab_size ** (k - n)  # one path for each prefix of n tokens
        counts = jnp.full(len(paths), n, jnp.int32)
        after = np.asarray(path_next_probs(counts, draft, target_probs))[first]
        survive = np.zeros((vocab_size**n, vocab_size))
        if n < k:
            step = (drawn * thresholds)[:, n].reshape(vocab_size ** (n + 1), -1)[:, 0]
            survive = reach[:, None] * step.reshape(vocab_size**n, vocab_size)
        emitted = survive + (reach - survive.sum(1))[:, None] * after
        errors.append(np.abs(emitted - reach[:, None] * p_tables[n]).max())
        # A round that stopped earlier continues autoregressively.
        joint = (emitted + (joint - reach)[:, None] * p_tables[n]).ravel()
        autoregressive = (autoregressive[:, None] * p_tables[n]).ravel()
        reach = survive.ravel()
    return max(errors), np.abs(joint - autoregressive).max()


path_next_probs = jax.jit(rejection.next_probs)


@jax.jit
def path_accepts(u, draft, target_probs):
    """Return ``bool[paths, K]``: whether the shipped test accepts token k at ``u[:, k]`` after those before it."""
    k = draft.tokens.shape[1]
    uniforms = jnp.eye(k) * u[:, :, None]
    counts = jax.vmap(rejection.count_accepted, (1, None, None), 1)(uniforms, draft, target_probs[:, :-1])
    return counts > jnp.arange(k)


def test_every_emitted_prefix_has_autoregressive_distribution(report):
    rng = np.random.default_rng(1)
    shapes = [(vocab_size, k) for vocab_size in (2, 3, 4) for k in (1, 2, 3, 4)]
    with jax.enable_x64(True):
        errors = [enumerate_round(rng, *shapes[i % len(shapes)]) for i in range(64)]
    prefix_error, joint_error = np.max(errors, axis=0)
    report(tables=len(errors), max_prefix_error=f"{prefix_error:.1e}", max_joint_error=f"{joint_error:.1e}")
    assert prefix_error <= 1e-12
    assert joint_error <= 1e-12


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24, None], ids=["u=0", "u=1-2^-24", "u random"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_degenerate_rows_give_no_nan_and_no_impossible_token(report, monkeypatch, rule, u):
    rows = 2_000
    kinds, draft, target_probs = degenerate_rows(np.random.default_rng(2), rows)
    if u is not None:
        in_rules(monkeypatch.setattr, "uniform", lambda keys: jnp.full(keys.shape, u, jnp.float32))
    row_keys, start = jax.random.split(jax.random.key(3), rows), jnp.full(rows, 5, jnp.int32)
    verdict = jax.jit(lambda *args: rule.accept(*args))(row_keys, start, draft, target_probs)
    after = np.asarray(jax.jit(rejection.next_probs)(verdict.num_accepted, draft, target_probs))
    num_accepted, p, q = map(np.asarray, (verdict.num_accepted, target_probs, draft.probs))
    tokens, here = np.asarray(draft.tokens), np.arange(rows)
    accepted = np.arange(tokens.shape[1]) < num_accepted[:, None]
    p_drafted = np.take_along_axis(p[:, :-1], tokens[..., None], -1)[..., 0]
    q_drafted = np.take_along_axis(q, tokens[..., None], -1)[..., 0]
    possible = np.nan_to_num(p[here, num_accepted]) > 0
    lawful = possible.any(-1)

    nan = np.isnan(after).sum()
    impossible = (accepted & ~(p_drafted > 0)).sum() + (lawful & ~possible[here, verdict.next_token]).sum()
    report(rows=rows, kinds=len(set(kinds)), nan_out=nan, impossible_tokens=impossible)
    assert nan == 0
    assert impossible == 0
    assert not (accepted & ~(np.isfinite(q_drafted) & (q_drafted > 0))).any(), "accepted a token not drawn from q"
    np.testing.assert_allclose(after.sum(-1), lawful, atol=1e-6)
    equal = (np.array(kinds) == "p == q") & (q_drafted > 0).all(-1)
    if not rule.shares_noise:
        assert (num_accepted[equal] == tokens.shape[1]).all(), "p = q must always be accepted"


def test_acceptance_comparison_is_strict():
    """A token with p = 0 is rejected even at u = 0, and a token at the threshold u q = p is rejected."""
    draft = Draft(jnp.zeros((2, 1), jnp.int32), jnp.asarray([[[0.5, 0.5]], [[0.5, 0.5]]]))
    target_probs = jnp.asarray([[[0.0, 1.0]], [[0.25, 0.75]]])
    np.testing.assert_array_equal(rejection.count_accepted(jnp.asarray([[0.0], [0.5]]), draft, target_probs), 0)
    below = jnp.asarray([[0.0], [np.nextafter(np.float32(0.5), np.float32(0))]])
    np.testing.assert_array_equal(rejection.count_accepted(below, draft, target_probs), [0, 1])


def test_residual_matches_hand_computation():
    p = jnp.asarray([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.5, 0.5, 0.0]])
    q = jnp.asarray([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2], [0.0, 0.0, 1.0]])
    expected = [[0.75, 0.0, 0.25], [0.5, 0.3, 0.2], [0.5, 0.5, 0.0]]
    np.testing.assert_allclose(residual(p, q), expected, atol=1e-6)


def test_uniform_reaches_0_but_never_1(report, monkeypatch):
    row_keys = jax.random.split(jax.random.key(5), (1_000, 1_000))
    u = np.asarray(keys.uniform(row_keys), np.float64)
    assert u.dtype == np.float64 and 0 <= u.min() < 1e-5 and 1 - 1e-5 < u.max() < 1
    counts = np.bincount((u.ravel() * 64).astype(int), minlength=64)
    p = oracle.p_value(counts, np.full(64, 1 / 64))
    report(draws=u.size, bins=64, p=f"{p:.3f}", alpha=oracle.ALPHA)
    assert p > oracle.ALPHA
    for words, expected in [((0, 0), 0.0), ((0, 1), 2.0**-56), ((2**32 - 1, 2**32 - 1), 1 - 2.0**-24)]:
        monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype, words=words: jnp.asarray(words, dtype))
        assert float(keys.uniform(row_keys[0, :1])[0]) == expected


@pytest.mark.slow
def test_far_tail_is_sampled_at_its_probability_with_many_draws(report):
    _check_far_tail(report, draws=10_000_000)


def test_far_tail_is_sampled_at_its_probability(report):
    """Tail tokens are drawn, though a single draw with JAX's default Gumbel noise, which ends at 16, never would.

    Two draws, one of a block and one within it, would reach them even so. See tests/core/test_keys.py for the noise.
    """
    _check_far_tail(report, draws=200_000)


def _check_far_tail(report, draws, chunk=20, tail_tokens=20_000):
    """Draw from a distribution whose tail tokens are each 18 nats below the head and hold 3e-4 of the mass together."""
    weights = np.append(1.0, np.full(tail_tokens, np.exp(-18.0)))
    probs = jnp.asarray(weights / weights.sum(), jnp.float32)
    rows = jnp.broadcast_to(probs, (chunk, probs.size))
    draw = jax.jit(lambda keys, rows: jax.lax.map(lambda chunk_keys: (sample(chunk_keys, rows) > 0).sum(), keys))
    row_keys = jax.random.split(jax.random.key(6), (draws // chunk, chunk))
    hits, mass = int(draw(row_keys, rows).sum()), float(probs[1:].sum())
    z = (hits - draws * mass) / (draws * mass) ** 0.5
    report(tail_mass=f"{mass:.1e}", draws=draws, hits=hits, expected=f"{draws * mass:.1f}", z=f"{z:.2f}")
    assert abs(z) <= 5
    assert hits > 0
