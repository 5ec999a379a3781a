"""The acceptance rule: algebra to 1e-12, a round enumerated to 1e-12, and rows that are no laws at all."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from mutants import in_rules

from jspec.acceptance import RULES, rejection
from jspec.core import keys
from jspec.core.probs import residual, sample
from jspec.core.types import Draft

PAIRS = 10_000


def random_laws(rng, shape, dtype=np.float64):
    """Laws over the last axis: half of them sharp, a third with zeros, some one-hot."""
    sharpness = rng.choice([0.3, 1.5], size=(*shape[:-1], 1))
    weights = rng.gamma(np.broadcast_to(sharpness, shape)) + 1e-9
    kept = (rng.random(shape) < 0.5) | (rng.random((*shape[:-1], 1)) > 1 / 3)
    kept |= np.arange(shape[-1]) == rng.integers(shape[-1], size=(*shape[:-1], 1))
    weights = np.where(kept, weights, 0).astype(dtype)
    return weights / weights.sum(-1, keepdims=True)


def special_pairs(rng, p, q):
    """Make a tenth of the pairs equal, a tenth equal but for rounding, and a tenth disjoint."""
    tenth, vocab_size = len(p) // 10, p.shape[-1]
    q[:tenth] = p[:tenth]
    q[tenth : 2 * tenth] = p[tenth : 2 * tenth] * (1 + rng.normal(size=(tenth, vocab_size)) * 1e-15)
    half = np.arange(vocab_size) < vocab_size // 2
    for laws, where in ((p, half), (q, ~half)):
        part = random_laws(rng, (tenth, vocab_size // 2), p.dtype)
        laws[2 * tenth : 3 * tenth] = 0
        laws[2 * tenth : 3 * tenth, where] = part
    return p, q


def emitted_law(p, q):
    """What a round of one draft emits, ``[N, V]``: ``q t + (1 - sum q t) residual``, t measured on the shipped test."""
    pairs, vocab_size = p.shape
    tokens = jnp.tile(jnp.arange(vocab_size, dtype=jnp.int32), pairs)[:, None]
    one = Draft(tokens, jnp.repeat(jnp.asarray(q), vocab_size, 0)[:, None])
    laws = jnp.repeat(jnp.asarray(p), vocab_size, 0)[:, None].repeat(2, 1)
    test = jax.jit(lambda u: rejection.count_accepted(u[:, None], one, laws[:, :1]) == 1)
    threshold = oracle.acceptance_thresholds(lambda u: np.asarray(test(u.astype(p.dtype))), pairs * vocab_size)
    threshold = threshold.reshape(pairs, vocab_size)
    first = Draft(jnp.zeros((pairs, 1), jnp.int32), jnp.asarray(q)[:, None])
    none = jnp.zeros(pairs, jnp.int32)
    left = jax.jit(lambda *args: rejection.next_probs(*args))(none, first, jnp.asarray(p)[:, None].repeat(2, 1))
    accepted = q * threshold
    return accepted + (1 - accepted.sum(-1, keepdims=True)) * np.asarray(left, np.float64), threshold


def algebra_error(dtype, pairs=PAIRS, seed=0):
    """Largest ``|emitted - p|`` over random pairs of laws, and largest error of the threshold where q > 0."""
    rng = np.random.default_rng(seed)
    p, q = special_pairs(rng, random_laws(rng, (pairs, 8), dtype), random_laws(rng, (pairs, 8), dtype))
    with jax.enable_x64(dtype == np.float64):
        law, threshold = emitted_law(p, q)
    exact = np.minimum(1, p.astype(float) / np.where(q > 0, q, 1))
    return np.abs(law - p).max(), np.abs(threshold - exact)[q > 0].max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-6)])
def test_acceptance_and_residual_add_up_to_the_target(report, dtype, tolerance):
    error, threshold_error = algebra_error(dtype)
    report(pairs=PAIRS, max_error=f"{error:.1e}", max_threshold_error=f"{threshold_error:.1e}", tolerance=tolerance)
    assert error <= tolerance
    assert threshold_error <= tolerance


def tables(rng, vocab_size, k):
    """Laws p and q after every prefix, all paths of k drafts as one `Draft`, and the target's laws along each."""
    paths = np.array(list(np.ndindex((vocab_size,) * k)), np.int32)
    p = [random_laws(rng, (vocab_size**n, vocab_size)) for n in range(k + 1)]
    q = [random_laws(rng, (vocab_size**n, vocab_size)) for n in range(k)]
    prefix = np.stack([np.arange(len(paths)) // vocab_size ** (k - n) for n in range(k + 1)], axis=1)
    draft = Draft(jnp.asarray(paths), jnp.stack([q[n][prefix[:, n]] for n in range(k)], axis=1))
    return p, q, draft, jnp.stack([p[n][prefix[:, n]] for n in range(k + 1)], axis=1)


def enumerate_round(rng, vocab_size, k):
    """Largest errors of a round on prefix-dependent tables: of the emitted prefixes, and of the law of k + 1 tokens."""
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
        # A round that stopped earlier goes on autoregressively.
        joint = (emitted + (joint - reach)[:, None] * p_tables[n]).ravel()
        autoregressive = (autoregressive[:, None] * p_tables[n]).ravel()
        reach = survive.ravel()
    return max(errors), np.abs(joint - autoregressive).max()


path_next_probs = jax.jit(rejection.next_probs)


@jax.jit
def path_accepts(u, draft, target_probs):
    """``bool[paths, K]``: whether the shipped test accepts draft k at ``u[:, k]``, those before it being accepted."""
    k = draft.tokens.shape[1]
    uniforms = jnp.eye(k) * u[:, :, None]
    counts = jax.vmap(rejection.count_accepted, (1, None, None), 1)(uniforms, draft, target_probs[:, :-1])
    return counts > jnp.arange(k)


def test_every_emitted_prefix_of_a_round_has_the_autoregressive_law(report):
    rng = np.random.default_rng(1)
    shapes = [(vocab_size, k) for vocab_size in (2, 3, 4) for k in (1, 2, 3, 4)]
    with jax.enable_x64(True):
        errors = [enumerate_round(rng, *shapes[i % len(shapes)]) for i in range(64)]
    prefix_error, joint_error = np.max(errors, axis=0)
    report(tables=len(errors), max_prefix_error=f"{prefix_error:.1e}", max_joint_error=f"{joint_error:.1e}")
    assert prefix_error <= 1e-12
    assert joint_error <= 1e-12


def degenerate_rows(rng, rows, k=2, vocab_size=8):
    """Laws and drafts for rows of every kind that has broken somebody's sampler; kind of each row comes first."""
    p = random_laws(rng, (rows, k + 1, vocab_size), np.float32)
    q = random_laws(rng, (rows, k, vocab_size), np.float32)
    tokens = np.array([[rng.choice(vocab_size, p=law / law.sum()) for law in row] for row in q.astype(float)])
    at = np.arange(vocab_size) == tokens[..., None]
    hot = np.eye(vocab_size, dtype=np.float32)
    low = np.arange(vocab_size) < vocab_size // 2
    kinds = [
        ("p == q", lambda: (p, p[:, :k])),
        ("disjoint", lambda: (np.where(low, p + 1e-3, 0), np.where(low, 0, q + 1e-3))),
        ("p = 0 under the draft", lambda: (np.where(pad(at), 0, p + 1e-3), q)),
        ("one-hot p", lambda: (hot[p.argmax(-1)], q)),
        ("one-hot q", lambda: (p, hot[tokens])),
        ("both one-hot", lambda: (hot[p.argmax(-1)], hot[tokens])),
        ("nothing left by rounding", lambda: (p, np.nextafter(p[:, :k], np.float32(2)))),
        ("q NaN", lambda: (p, np.full_like(q, np.nan))),
        ("q NaN at the token", lambda: (p, np.where(at, np.nan, q))),
        ("q +inf at the token", lambda: (p, np.where(at, np.inf, q))),
        ("q all 0", lambda: (p, np.zeros_like(q))),
        ("p all 0", lambda: (np.zeros_like(p), q)),
        ("p NaN", lambda: (np.where(p > 0.3, np.nan, p), q)),
    ]
    kind = np.arange(rows) % len(kinds)
    with np.errstate(invalid="ignore"):
        p, q = (np.select([kind[:, None, None] == i for i in range(len(kinds))], laws)
                for laws in zip(*[make() for _, make in kinds], strict=True))  # fmt: skip
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.asarray(q, jnp.float32))
    return [kinds[i][0] for i in kind], draft, jnp.asarray(p, jnp.float32)


def pad(at):
    """``at[rows, K, V]`` with a last position at which nothing is marked."""
    return np.pad(at, ((0, 0), (0, 1), (0, 0)))


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


def test_the_comparison_is_strict():
    """At u = 0 a token with p = 0 is refused, and at the threshold itself u q = p is refused."""
    draft = Draft(jnp.zeros((2, 1), jnp.int32), jnp.asarray([[[0.5, 0.5]], [[0.5, 0.5]]]))
    target_probs = jnp.asarray([[[0.0, 1.0]], [[0.25, 0.75]]])
    np.testing.assert_array_equal(rejection.count_accepted(jnp.asarray([[0.0], [0.5]]), draft, target_probs), 0)
    below = jnp.asarray([[0.0], [np.nextafter(np.float32(0.5), np.float32(0))]])
    np.testing.assert_array_equal(rejection.count_accepted(below, draft, target_probs), [0, 1])


def test_residual_by_hand():
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
def test_far_tail_is_drawn_as_often_as_it_should_be_at_length(report):
    _check_far_tail(report, draws=10_000_000)


def test_far_tail_is_drawn_as_often_as_it_should_be(report):
    """One draw over the vocabulary with Gumbel noise of JAX's default mode, which ends at 16, would never draw these.

    Two draws, of a block and in it, would even so: what noise reaches is in tests/test_keys.py.
    """
    _check_far_tail(report, draws=200_000)


def _check_far_tail(report, draws, chunk=20, tail_tokens=20_000):
    """Tail tokens each 18 nats below the head: together 3e-4 of the mass."""
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
