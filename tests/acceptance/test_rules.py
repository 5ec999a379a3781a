"""Rules besides rejection: block verification by enumeration, coupling against plain decoding, and distortions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.acceptance import RULES, block, lossy, rejection
from jspec.acceptance.block import Block, block_chances, block_weights
from jspec.acceptance.rejection import Rejection, next_probs
from jspec.core.keys import Purpose, gumbel, stream
from jspec.core.probs import sample_with_noise
from jspec.core.sampling import SamplingParams
from jspec.core.types import BONUS, Draft
from jspec.drafters import ModelDrafter
from support import oracle, toys
from support.accept import random_laws, tables

# On a chain, every other rule equals one of these. See tests/acceptance/test_tree_rules.py.
ON_CHAINS = ("rejection", "block", "coupled")
LOSSY = (jspec.Lenient(0.3), jspec.Typical(0.3, 0.6), jspec.TopK(2), jspec.Threshold(0.15), jspec.Relaxed(3, 1.0))


def autoregressive(laws, start=1.0):
    """Return the joint distribution of the following tokens, indexed in base V; `start` is the mass of each prefix."""
    joint = np.asarray(start)
    for law in laws:
        joint = (joint.reshape(-1, 1) * law).ravel()
    return joint


def block_by_definition(draft, target_probs):
    """Return the weights and chances of Sun et al. 2024, algorithm 2, path by path in plain Python."""
    weights, chances = [], []
    for path, q, p in zip(*map(np.asarray, (draft.tokens, draft.probs, target_probs)), strict=True):
        w, row = [1.0], []
        for i, token in enumerate(path):
            w.append(min(w[-1] * p[i, token] / q[i, token], 1.0) if q[i, token] > 0 else 0.0)
        for i in range(1, len(path)):
            left = np.maximum(w[i] * p[i] - q[i], 0).sum()
            row.append(1.0 if w[i] >= 1 else left / (left + 1 - w[i]))
        weights.append(w)
        chances.append([*row, w[-1]])
    return np.array(weights), np.array(chances)


def enumerated_block(p, q, draft, target_probs):
    """Return the joint distribution of k + 1 tokens that start with one block round, and its mean accepted length."""
    paths, k = draft.tokens.shape
    vocab_size = target_probs.shape[-1]
    weights = jax.jit(block_weights)(draft, target_probs)
    chances = np.asarray(jax.jit(block_chances)(weights, draft, target_probs))
    reached = autoregressive(q)  # of each path
    joint, kept = np.zeros(vocab_size ** (k + 1)), 0.0
    for n in range(k + 1):
        mass = reached * np.prod(1 - chances[:, n:], axis=1) * (chances[:, n - 1] if n else 1)
        counts = jnp.full(paths, n, jnp.int32)
        after = np.asarray(jax.jit(next_probs)(counts, draft, target_probs, weights[:, n : n + 1]))
        # Sum by path, not by prefix: if something is wrong, the tokens drafted after the prefix may matter.
        texts = (mass[:, None] * after).reshape(vocab_size**n, -1, vocab_size).sum(1)
        joint += autoregressive(p[n + 1 :], texts.ravel())
        kept += n * mass.sum()
    return joint, kept


def test_block_verification_is_exact_for_drafts_stopped_midway(report):
    """Every sequence keeps its probability, in float64, even if the length of a draft depends on the draft."""
    rng, errors, fewer, biases = np.random.default_rng(1), [], [], []
    with jax.enable_x64(True):
        for v, k in ((2, 2), (3, 2), (3, 3), (2, 4)):
            p, q, draft, target_probs = tables(rng, v, k)
            full = enumerated_block(p, q, draft, target_probs)[1]
            # Drafting stops after the first token 0, which stays in the draft.
            going = np.cumprod(np.asarray(draft.tokens) != 0, axis=1)
            drafted = np.pad(going[:, :-1], ((0, 0), (1, 0)), constant_values=1)
            short = Draft(draft.tokens, draft.probs * drafted[..., None])
            joint, kept = enumerated_block(p, q, short, target_probs)
            errors.append(np.abs(joint - autoregressive(p)).max())
            fewer.append(full - kept)
            # The wrong variant also drops the token 0, which decided where to stop.
            wrong = enumerated_block(p, q, Draft(draft.tokens, draft.probs * going[..., None]), target_probs)[0]
            biases.append(np.abs(wrong - autoregressive(p)).max())
    found = {"kept_less": f"{min(fewer):.2f} to {max(fewer):.2f}", "wrong_variant": [f"{bias:.1e}" for bias in biases]}
    report(tables=len(errors), max_error=f"{max(errors):.1e}", **found)
    assert max(errors) <= 1e-12 and min(fewer) > 0.01
    # On one of the tables, the wrong variant is right by chance.
    assert np.sum(np.array(biases) > 1e-3) == 3 and max(biases) > 0.1


def test_block_verification_is_exact_by_enumeration(report):
    """A round plus plain decoding is exact in float64, and never keeps fewer drafts than verifying token by token."""
    rng = np.random.default_rng(0)
    shapes, errors, gains = [(v, k) for v in (2, 3, 4) for k in (1, 2, 3, 4)], [], []
    with jax.enable_x64(True):
        for i in range(64):
            p, q, draft, target_probs = tables(rng, *shapes[i % len(shapes)])
            joint, kept = enumerated_block(p, q, draft, target_probs)
            both, by_tokens = 1.0, 0.0
            for n in range(len(q)):
                both = autoregressive([np.minimum(p[n], q[n])], both)
                by_tokens += both.sum()
            weights = jax.jit(block_weights)(draft, target_probs)
            found = weights, jax.jit(block_chances)(weights, draft, target_probs)
            for ours, theirs in zip(found, block_by_definition(draft, target_probs), strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-12)
            errors.append(np.abs(joint - autoregressive(p)).max())
            gains.append(kept - by_tokens)
    found = {"least_gain": f"{min(gains):.1e}", "mean_gain": f"{np.mean(gains):.3f} drafts a round"}
    report(tables=len(errors), max_error=f"{max(errors):.1e}", **found)
    assert max(errors) <= 1e-12
    assert min(gains) >= -1e-12 and max(gains) > 0.01


@pytest.mark.parametrize("name", ON_CHAINS)
def test_nan_context_is_neither_avoided_nor_hidden(report, name, quick_compile):
    """The target's logits after token 0 are NaN, so half of the sequences must end there under every rule."""
    target = toys.MarkovModel(jnp.array([[jnp.nan, jnp.nan], [0.0, 0.0]]))
    draft = toys.MarkovModel(jnp.log(jnp.array([[0.9, 0.1]] * 2)))
    draws = 20_000
    batch = np.ones((draws, 1), int), np.ones(draws, int), jax.random.split(jax.random.key(0), draws)
    options = {"max_new_tokens": 2, "num_draft_tokens": 2, "accept": name}
    out = jspec.speculative_generate(target, ModelDrafter(draft), *batch, **options)
    broken = np.asarray(out.stats.invalid)
    report(texts=draws, ended_there=broken.mean())
    assert abs(broken.mean() - 0.5) < 4 * 0.5 / draws**0.5
    np.testing.assert_array_equal(out.tokens[:, 0] == 0, broken)


def markov():
    """Return the target and draft model of `texts`, whose sequences start in state 2."""
    return toys.markov_pair(3, vocab_size=4, scale=1.5)


def texts(rule, seed, draws=200_000, k=3):
    """Return counts of four tokens decoded with `rule` on Markov tables, the joint distribution, and the output."""
    target, draft = markov()
    tokens, lengths = jnp.full((draws, 1), 2, jnp.int32), jnp.ones(draws, jnp.int32)
    batch = tokens, lengths, jax.random.split(jax.random.key(seed), draws)
    options = {"max_new_tokens": 4, "num_draft_tokens": k, "rule": rule}
    out = toys.decode(target, ModelDrafter(draft), *batch, toys.both_transforms(SamplingParams(), draws), **options)
    law = oracle.softmax(np.asarray(target.table, float))
    joint = oracle.joint_law(lambda text: law[text[-1] if text else 2], 4, 4)
    return np.bincount(np.asarray(out.tokens) @ [64, 16, 4, 1], minlength=256), joint, out


@pytest.mark.parametrize("name", ON_CHAINS)
def test_four_tokens_over_several_rounds_have_joint_distribution(report, name):
    counts, joint, _ = texts(RULES[name], seed=1)
    p = oracle.p_value(counts, joint)
    report(texts=counts.sum(), p=f"{p:.2g}", alpha=oracle.ALPHA, sees_tv=f"{oracle.detectable(counts.sum(), 255):.4f}")
    assert p > oracle.ALPHA


def test_reusing_noise_of_rejected_drafts_is_biased(report, monkeypatch):
    """Planted bug: block verification uses streams by position, as token-by-token rejection may."""

    def by_position(keys, positions, purpose):
        return keys if positions.ndim == 1 and purpose is Purpose.ACCEPT else stream(keys, positions, purpose)

    monkeypatch.setattr(block, "stream", by_position)
    counts, joint, _ = texts(Block(), seed=1)
    p = oracle.p_value(counts, joint)
    report(texts=counts.sum(), p=f"{p:.1e}", alpha=oracle.ALPHA)
    assert p < oracle.ALPHA


@pytest.mark.slow  # a part of it runs in tests/exactness/test_matrix.py
def test_coupled_output_equals_plain_decoding(report, toy, prompts, quick_compile):
    """Coupled output equals plain output in 500 requests of 64 tokens, for a near draft, a far one and the target."""
    target, batch = toy(0), prompts([1 + i % 9 for i in range(500)])
    sampling = SamplingParams(temperature=np.resize([1.0, 0.7, 0.0, 1.3], 500), top_p=np.resize([1.0, 0.9, 0.8], 500))
    options = {"max_new_tokens": 64, "sampling": sampling}
    plain = jspec.generate(target, *batch, **options)
    different, rates = 0, []
    for draft in (toy(0, distance=0.1), toy(1), target):
        for k in (1, 3, 5):
            out = jspec.speculative_generate(target, draft, *batch, num_draft_tokens=k, accept="coupled", **options)
            different += (np.asarray(out.tokens) != plain.tokens).any(1).sum()
            rates.append(float(out.stats.accepted.sum() / out.stats.drafted.sum()))
    report(texts=500 * 9, tokens=500 * 64 * 9, different=different, kept=[f"{rate:.2f}" for rate in rates])
    assert different == 0
    assert min(rates[6:]) == 1.0 and rates[3] < rates[0] < 1


def test_coupled_acceptance_matches_closed_form(report):
    """Shared Gumbel noise draws i from both p and q with chance ``1 / sum_j max(p_j/p_i, q_j/q_i)``.

    The formula applies to the blocks, and then to the tokens within a block.
    """
    rng, vocab_size, draws = np.random.default_rng(5), 8, 200_000
    noise = gumbel(jax.random.split(jax.random.key(6), draws), vocab_size)
    width = noise.shape[-1]
    worst, kept, optimal = 0.0, [], []
    for _ in range(20):
        p, q = rng.gamma(0.5, size=(2, vocab_size)) + 1e-3
        p, q = p / p.sum(), q / q.sum()
        drawn = [sample_with_noise(noise, jnp.broadcast_to(jnp.float32(law), (draws, vocab_size))) for law in (p, q)]
        same = float(jnp.mean(drawn[0] == drawn[1]))
        blocks = [np.pad(law, (0, -vocab_size % width)).reshape(-1, width) for law in (p, q)]
        shares = agree(*(block.sum(1) for block in blocks))
        rate = sum(agree(*(block[i] for block in blocks)).sum() * share for i, share in enumerate(shares))
        worst = max(worst, abs(same - rate) / (rate * (1 - rate) / draws) ** 0.5)
        kept.append(rate)
        optimal.append(np.minimum(p, q).sum())
    rates = {"kept": f"{np.mean(kept):.3f}", "optimal": f"{np.mean(optimal):.3f}"}
    report(pairs=20, draws_each=draws, max_abs_z=f"{worst:.2f}", **rates)
    assert worst < 4.5


def agree(p, q):
    """Return the chance that shared Gumbel noise draws index i from both p and q, for every i."""
    p, q = p / p.sum(), q / q.sum()
    return np.array([1 / np.maximum(p / a, q / b).sum() if a > 0 and b > 0 else 0.0 for a, b in zip(p, q, strict=True)])


@pytest.mark.parametrize("rule", LOSSY, ids=str)
def test_distortion_equals_enumerated_distance(report, rule):
    """A lossy rule's token distribution, measured on its own thresholds, is as far from p as its distortion says."""
    rng, pairs, vocab_size = np.random.default_rng(7), 500, 8
    p, q = random_laws(rng, (pairs, vocab_size)), random_laws(rng, (pairs, vocab_size))
    tokens = np.tile(np.arange(vocab_size, dtype=np.int32), pairs)[:, None]
    keys, start = jax.random.split(jax.random.key(8), tokens.size), jnp.zeros(tokens.size, jnp.int32)
    with jax.enable_x64(True):
        draft = Draft(jnp.asarray(tokens), jnp.repeat(jnp.asarray(q), vocab_size, 0)[:, None])
        laws = jnp.repeat(jnp.asarray(p), vocab_size, 0)[:, None].repeat(2, 1)
        thresholds, after, receipts = judged(rule, keys, start, draft, laws)
    kept, possible = thresholds.reshape(p.shape), q > 0
    np.testing.assert_allclose(kept[possible], chances(rule, p, np.where(possible, q, 1))[possible], atol=1e-6)
    accepted = q * kept
    law = accepted + (1 - accepted.sum(1, keepdims=True)) * after.reshape(pairs, vocab_size, vocab_size)[:, 0]
    error = np.abs(np.abs(law - p).sum(1) / 2 - receipts.reshape(p.shape)[:, 0]).max()
    report(pairs=pairs, mean_distance=f"{receipts.mean():.3f}", max_error=f"{error:.1e}")
    assert error <= 1e-6 and receipts.mean() > 0.01
    if isinstance(rule, jspec.Lenient):
        assert (law <= p / rule.leniency + 1e-9).all()


def chances(rule, p, q):
    """Return the probability that `rule` keeps each token, by its definition, for distributions ``[N, V]``."""
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(1, keepdims=True)
    rank = (p[:, None, :] > p[:, :, None]).sum(2)  # number of more likely tokens
    return {
        jspec.Lenient: lambda: p / (rule.leniency * q),
        jspec.Typical: lambda: np.where(p > np.minimum(rule.epsilon, rule.delta * np.exp(-entropy)), 1, 0),
        jspec.TopK: lambda: np.where((rank < rule.k) & (p > 0), 1, 0),
        jspec.Threshold: lambda: np.where(p >= rule.probability, 1, 0),
        jspec.Relaxed: lambda: np.where(
            (rank < rule.beta) & (p > 0) & (np.log(p.max(1, keepdims=True) / np.where(p > 0, p, 1)) <= rule.tau), 1, 0
        ),
    }[type(rule)]().clip(max=1)


def judged(rule, keys, start, draft, laws):
    """Return each row's acceptance threshold, distribution after a rejection, and distortion, from ``rule.accept``."""
    seen = {}

    def verdict(u):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rejection, "uniform", lambda keys: u[:, None])
            patch.setattr(rejection, "next_probs", lambda n, *rest: seen.setdefault("law", next_probs(n * 0, *rest)))
            seen.clear()
            out = rule.accept(keys, start, draft, laws)
        return out.num_accepted == 1, seen["law"], out.distortion[:, 0]

    run = jax.jit(verdict)
    thresholds = oracle.acceptance_thresholds(lambda u: np.asarray(run(u)[0]), draft.tokens.size)
    _, after, receipts = map(np.asarray, run(np.zeros(draft.tokens.size)))
    return thresholds, after, receipts


@pytest.mark.slow
def test_distortion_sums_over_tokens(report, quick_compile):
    """A sequence's distortion is the sum over its tokens, each verified in the state that the sequence had reached."""
    rule = jspec.TopK(1)
    counts, joint, out = texts(rule, seed=2)
    p, q = (oracle.softmax(np.asarray(model.table, float)) for model in markov())
    each = np.where(p == p.max(1, keepdims=True), np.maximum(q - p, 0), 0).sum(1)  # of a token drafted in each state
    states = np.concatenate([np.full((len(out.tokens), 1), 2), out.tokens[:, :-1]], axis=1)
    expected = np.where(out.origins == BONUS, 0, each[states]).sum(1)
    np.testing.assert_allclose(out.stats.distortion, expected, atol=1e-5)
    distance = np.abs(counts / counts.sum() - joint).sum() / 2
    noise = np.sqrt(2 / np.pi * joint / counts.sum()).sum() / 2
    paid = float(out.stats.distortion.mean())
    report(distance_of_texts=f"{distance:.3f}", mean_receipt=f"{paid:.3f}", sampling_noise=f"{noise:.4f}")
    assert 0.05 < distance <= paid + 4 * noise


def test_distortion_does_not_depend_on_neighbours(toy, prompts, quick_compile):
    models, batch, limits = (toy(0), toy(1)), prompts([4, 6]), np.array([4, 24])

    def receipts(rows):
        options = {"max_new_tokens": 24, "sampling": SamplingParams(max_tokens=limits[rows])}
        few = (part[rows] for part in batch)
        return jspec.speculative_generate(*models, *few, accept=jspec.Lenient(0.1), **options).stats.distortion

    together = receipts(slice(0, 2))
    assert together[0] > 0
    np.testing.assert_allclose(receipts(slice(0, 1)), together[:1], rtol=1e-5)


@pytest.mark.parametrize("name", ON_CHAINS)
def test_exact_rules_have_zero_distortion(name, quick_compile):
    assert RULES[name].exact
    np.testing.assert_array_equal(texts(RULES[name], seed=3, draws=8)[2].stats.distortion, 0)


def test_undeclared_distortion_of_lossy_rule_is_nan(quick_compile):
    @dataclasses.dataclass(frozen=True)
    class Silent(Rejection):
        exact = False

    assert np.isnan(texts(Silent(), seed=3, draws=8)[2].stats.distortion).all()


@pytest.mark.slow
def test_more_leniency_keeps_more_drafts(report, quick_compile):
    """Acceptance changes in the direction of Leviathan et al. 2023, table 5."""
    rules = Rejection(), jspec.Lenient(1.0), jspec.Lenient(0.5), jspec.Lenient(0.1)
    rates = [np.mean(np.asarray(texts(rule, seed=4, draws=20_000)[2].stats.accepted)) for rule in rules]
    report(kept=[f"{rate:.3f}" for rate in rates])
    assert rates[0] == rates[1] < rates[2] < rates[3]


def test_every_rule_declares_whether_it_is_exact():
    assert all(rule.exact for rule in RULES.values())
    assert not any(rule.exact for rule in LOSSY)
    types = {value for value in vars(lossy).values() if isinstance(value, type)}
    defined = {value for value in types if value.__module__ == lossy.__name__}
    assert {type(rule) for rule in LOSSY} == defined
