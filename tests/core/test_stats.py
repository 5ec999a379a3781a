"""Verified draft tokens, acceptance rates and origins with varying lengths or no drafts, recounted from outputs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.types import ACCEPTED, BONUS, CORRECTED, NO_DRAFT, PADDING, Stats
from jspec.drafters import Draft, ModelDrafter, Stateless
from support import toys

pytestmark = pytest.mark.usefixtures("quick_compile")
K, NEW = 4, 24


def generate(target, draft, batch, **options):
    out = jspec.speculative_generate(target, draft, *batch, **{"max_new_tokens": NEW, "num_draft_tokens": K} | options)
    return jax.device_get(out)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Known(Stateless):
    """A drafter of the next ``counts[row]`` tokens of a known text, in which token 2 of each draft is always wrong."""

    text: jax.Array
    counts: jax.Array
    vocab_size = max_positions = None

    def propose(self, state, context, num_draft_tokens):
        at = context.lengths[:, None] + jnp.arange(num_draft_tokens)
        tokens = jnp.take_along_axis(self.text, at, axis=1, mode="clip")
        tokens = jnp.where(jnp.arange(num_draft_tokens) == 2, (tokens + 1) % context.vocab_size, tokens)
        guessed = jnp.arange(num_draft_tokens) < self.counts[:, None]
        return Draft(tokens, jax.nn.one_hot(tokens, context.vocab_size) * guessed[..., None]), state


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("length", [K, jspec.UpTo(K)], ids=["fixed", "varying"])
def test_each_round_is_counted(toy, rule, length):
    """Rows draft 0 to 4 tokens a round, of which the third is wrong. Decoding is greedy, so every round is known."""
    target, (tokens, lengths) = toy(0), (np.arange(5)[:, None] + 3, np.ones(5, np.int32))
    batch = tokens, lengths, jax.random.split(jax.random.key(0), 5)
    greedy = jspec.SamplingParams(temperature=0)
    plain = jspec.generate(target, *batch, max_new_tokens=NEW, sampling=greedy)
    known = Known(jnp.concatenate([tokens, plain.tokens], axis=1), jnp.arange(5))
    out = generate(target, known, batch, sampling=greedy, accept=rule, num_draft_tokens=length)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    rounds = [[NO_DRAFT], [ACCEPTED, BONUS], [ACCEPTED, ACCEPTED, BONUS], *[[ACCEPTED, ACCEPTED, CORRECTED]] * 2]
    for row, round_ in enumerate(rounds):
        np.testing.assert_array_equal(out.origins[row], np.resize(round_, NEW))
    np.testing.assert_array_equal(out.stats.rounds, [24, 12, 8, 8, 8])
    np.testing.assert_array_equal(out.stats.judged_at, [[0] * 4, [12, 0, 0, 0], [8, 8, 0, 0], *[[8, 8, 8, 0]] * 2])
    np.testing.assert_allclose(out.stats.acceptance_rate, [np.nan, 1, 1, 2 / 3, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(out.stats.mean_acceptance_length, [1, 2, 3, 3, 3])
    np.testing.assert_array_equal(out.stats.acceptance_rate_at[3:], [[1, 1, 0, np.nan]] * 2)


def test_drafts_cut_by_limit_or_eos_are_not_counted_as_verified(toy):
    """Limits of 1 to 4 tokens cut a round that drafts two correct tokens and a wrong one."""
    target, batch = toy(0), (np.full((5, 1), 3), np.ones(5, np.int32), jax.random.split(jax.random.key(0), 5))
    text = jspec.generate(target, *batch, max_new_tokens=NEW, sampling=jspec.SamplingParams(temperature=0)).tokens
    known = Known(jnp.concatenate([batch[0], text], axis=1), jnp.full(5, K))
    sampling = jspec.SamplingParams(temperature=0, max_tokens=[1, 2, 3, 4, 0])
    assert text[0, 1] != text[0, 0]
    ends = [[-1]] * 4 + [[int(text[0, 1])]]
    stats = generate(target, known, batch, sampling=sampling, eos_ids=ends).stats
    np.testing.assert_array_equal(
        stats.judged_at, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [2, 1, 1, 0], [1, 1, 0, 0]]
    )
    np.testing.assert_array_equal(
        stats.accepted_at, [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [2, 1, 0, 0], [1, 1, 0, 0]]
    )


@pytest.mark.parametrize(
    ("rule", "length"),
    [
        ("rejection", K),
        ("block", jspec.WhileConfident(K, 0.3)),
        (jspec.Lenient(0.5), jspec.Heuristic(K)),
    ],
    ids=str,
)
def test_acceptance_rate_counts_only_verified_drafts(rule, length, report):
    """At temperature 1, the acceptance rate equals a recount from origins."""
    target, draft = toys.markov_pair(3)
    rows = 512
    batch = np.full((rows, 1), 2), np.ones(rows, np.int32), jax.random.split(jax.random.key(1), rows)
    out = generate(target, ModelDrafter(draft), batch, num_draft_tokens=length, accept=rule)
    accepted, corrected = ((out.origins == origin).sum() for origin in (ACCEPTED, CORRECTED))
    rate = float(out.stats.accepted.sum() / out.stats.judged.sum())
    assert rate == pytest.approx(accepted / (accepted + corrected))
    assert (out.origins != PADDING).all() and not (out.origins == NO_DRAFT).any()
    report(judged=int(out.stats.judged.sum()), rate=f"{rate:.3f}")


def test_properties_return_numpy_for_numpy_and_jax_for_jax():
    counts = [np.array([2, 0], np.int32)] * 3
    by_depth = np.array([[2, 1], [0, 0]], np.int32), np.array([[3, 2], [0, 0]], np.int32)
    stats = Stats(*counts, *by_depth, np.zeros(2, bool), np.zeros(2, np.float32))
    for name in ("judged", "acceptance_rate", "acceptance_rate_at", "mean_acceptance_length"):
        value = getattr(stats, name)
        traced = jax.jit(lambda stats, name=name: getattr(stats, name))(stats)
        assert type(value) is np.ndarray and isinstance(traced, jax.Array) and value.dtype == traced.dtype
        np.testing.assert_array_equal(value, traced)
    np.testing.assert_allclose(stats.acceptance_rate, [0.4, np.nan])
