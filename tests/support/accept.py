"""Helpers for the acceptance tests and others."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.acceptance import rejection
from jspec.core.types import Draft
from support import oracle

PAIRS = 10_000


def random_laws(rng, shape, dtype=np.float64):
    """Return distributions over the last axis: half of them sharp, a third with zeros, some one-hot."""
    sharpness = rng.choice([0.3, 1.5], size=(*shape[:-1], 1))
    weights = rng.gamma(np.broadcast_to(sharpness, shape)) + 1e-9
    kept = (rng.random(shape) < 0.5) | (rng.random((*shape[:-1], 1)) > 1 / 3)
    kept |= np.arange(shape[-1]) == rng.integers(shape[-1], size=(*shape[:-1], 1))
    weights = np.where(kept, weights, 0).astype(dtype)
    return weights / weights.sum(-1, keepdims=True)


def special_pairs(rng, p, q):
    """Make a tenth of the pairs equal, a tenth equal up to rounding, and a tenth disjoint."""
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
    """Return the distribution ``[N, V]`` that a round of one draft token emits, and the acceptance thresholds.

    The distribution is ``q t + (1 - sum q t) residual``, with t measured on the shipped test.
    """
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
    """Return the largest ``|emitted - p|`` over random pairs, and the largest threshold error where q > 0."""
    rng = np.random.default_rng(seed)
    p, q = special_pairs(rng, random_laws(rng, (pairs, 8), dtype), random_laws(rng, (pairs, 8), dtype))
    with jax.enable_x64(dtype == np.float64):
        law, threshold = emitted_law(p, q)
    exact = np.minimum(1, p.astype(float) / np.where(q > 0, q, 1))
    return np.abs(law - p).max(), np.abs(threshold - exact)[q > 0].max()


def tables(rng, vocab_size, k):
    """Return p and q after every prefix, all paths of k draft tokens as one `Draft`, and the target's p along each."""
    paths = np.array(list(np.ndindex((vocab_size,) * k)), np.int32)
    p = [random_laws(rng, (vocab_size**n, vocab_size)) for n in range(k + 1)]
    q = [random_laws(rng, (vocab_size**n, vocab_size)) for n in range(k)]
    prefix = np.stack([np.arange(len(paths)) // vocab_size ** (k - n) for n in range(k + 1)], axis=1)
    draft = Draft(jnp.asarray(paths), jnp.stack([q[n][prefix[:, n]] for n in range(k)], axis=1))
    return p, q, draft, jnp.stack([p[n][prefix[:, n]] for n in range(k + 1)], axis=1)


def degenerate_rows(rng, rows, k=2, vocab_size=8):
    """Return kinds, drafts and target distributions for rows of every kind that has broken some sampler."""
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
        p, q = (
            np.select([kind[:, None, None] == i for i in range(len(kinds))], laws)
            for laws in zip(*[make() for _, make in kinds], strict=True)
        )
    draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.asarray(q, jnp.float32))
    return [kinds[i][0] for i in kind], draft, jnp.asarray(p, jnp.float32)


def pad(at):
    """Extend ``at[rows, K, V]`` by a last position at which nothing is marked."""
    return np.pad(at, ((0, 0), (0, 1), (0, 0)))
