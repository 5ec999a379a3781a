"""Tree rules beyond `test_walk`: K-SEQ's shared factor, and distortions against enumerated distributions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import Tree, TreeDrafter
from jspec.acceptance import k_seq, lossy
from jspec.acceptance.k_seq import residual_at, shared_factor, verify_siblings
from jspec.drafters import BigramDrafter
from jspec.rules import RULES, Draft, kept_in_turn, next_probs_at
from support import drafters, oracle, toys, walk
from support.accept import degenerate_rows, random_laws
from support.walk import CASES, TOLERANCE, drafts, ends_of_walk, joint_law, tables, text_of, texts_behind

pytestmark = pytest.mark.usefixtures("quick_compile", "freed_programs")

LENIENT, TYPICAL = jspec.Lenient(0.3), jspec.Typical(0.3, 0.6)
FEW = {("two children", True), ("1-2-1", False)}
TREES = [
    pytest.param(name, replacement, marks=[] if (name, replacement) in FEW else pytest.mark.slow)
    for name in CASES
    if name != "depth first"
    for replacement in (False, True)
]
KEYS = jax.random.split(jax.random.key(0), 1)


def every_draft(tree, vocab_size, replacement, seed=0):
    """Return the target's distributions by prefix, all drafts with weights, and a batch with distributions by node."""
    p, q = tables(np.random.default_rng(seed), vocab_size, tree.max_depth)
    found = drafts(tree, q, replacement)
    weights, tokens, laws = (np.array(part) for part in zip(*found, strict=True))
    target_probs = np.array([[p[text_of(tree, node, row)] for node in range(tree.size + 1)] for row in tokens])
    return p, found, weights, Draft(jnp.asarray(tokens), jnp.asarray(laws), tree), jnp.asarray(target_probs)


def distances(joint, p, depth):
    """Return each position's mean distance from the target over prefixes, and the distance of whole sequences."""
    vocab_size, found = joint.shape[0], []
    for n in range(depth + 1):
        prefixes = joint.sum(tuple(range(n + 1, depth + 1))).reshape(-1, vocab_size)
        target = np.array([p[text] for text in np.ndindex((vocab_size,) * n)])
        found.append(np.abs(prefixes - prefixes.sum(1, keepdims=True) * target).sum() / 2)
    return np.array(found), np.abs(joint - texts_behind(p, (), p[()], depth + 1)).sum() / 2


@pytest.mark.parametrize(("name", "replacement"), TREES)
def test_lenient_distortion_bounds_distance_at_every_position(report, name, replacement):
    tree, vocab_size = CASES[name]
    with jax.enable_x64(True):
        p, found, weights, draft, target_probs = every_draft(tree, vocab_size, replacement)
        paid = np.asarray(
            kept_in_turn(
                [jnp.zeros((len(weights), tree.max_depth))] * tree.max_children, draft, target_probs, LENIENT._bound
            )[1]
        )
        ends = list(ends_of_walk(draft, target_probs, LENIENT._bound))
        joint = joint_law(tree, p, found, lambda *_: ends)
    mean = np.zeros(tree.max_depth + 1)
    for node, (mass, _) in enumerate(ends):
        for depth, above in enumerate([0, *tree.paths[node][: tree.offsets[node]]]):
            mean[depth] += (weights * mass * paid[:, above]).sum()
    off, texts = distances(joint, p, tree.max_depth)
    report(off=np.round(off, 3).tolist(), receipts=np.round(mean, 3).tolist(), texts=f"{texts:.3f}")
    assert abs(joint.sum() - 1) < TOLERANCE and (joint <= most_of(p, tree.max_depth, 0.3) + TOLERANCE).all()
    assert (off <= mean + TOLERANCE).all() and 0.02 < texts <= mean.sum() + TOLERANCE
    if tree.max_children == 1:
        np.testing.assert_allclose(mean, off, atol=TOLERANCE)


def most_of(p, depth, leniency):
    """Return each sequence's largest allowed probability: ``1 / leniency`` times the target's for each token."""
    return texts_behind(p, (), p[()], depth + 1) / leniency ** (depth + 1)


@pytest.mark.parametrize(("name", "replacement"), TREES[2:])  # the chain is in tests/acceptance/test_rules.py
def test_longest_branch_distortion_bounds_distance_of_sequences(report, name, replacement):
    texts, mean = of_longest(name, replacement)
    report(texts=f"{texts:.3f}", receipts=f"{mean:.3f}")
    assert 0.01 < texts <= mean + TOLERANCE


def of_longest(name, replacement):
    """Return the distance from the target of sequences from a `Typical` round, and the mean distortion."""
    tree, vocab_size = CASES[name]
    with jax.enable_x64(True):
        p, found, weights, draft, target_probs = every_draft(tree, vocab_size, replacement)
        rows, keys = len(weights), jnp.broadcast_to(KEYS, len(weights))
        accept = jax.jit(lambda: TYPICAL.accept(keys, jnp.zeros(rows, jnp.int32), draft, target_probs))
        verdict = jax.device_get(accept())
        next_probs = jax.jit(lambda end: next_probs_at(end, draft, target_probs, bound_of(TYPICAL)))
        end = np.pad(verdict.path, ((0, 0), (1, 0)))[np.arange(rows), verdict.num_accepted]
        joint = joint_law(
            tree,
            p,
            found,
            lambda *_: [
                ((end == node).astype(float), np.asarray(next_probs(jnp.full(rows, node))))
                for node in range(tree.size + 1)
            ],
        )
    kept = np.arange(tree.max_depth + 1) <= verdict.num_accepted[:, None]
    paid = np.where(kept, verdict.distortion, 0).sum(1)
    assert abs(joint.sum() - 1) < TOLERANCE
    return distances(joint, p, tree.max_depth)[1], weights @ paid


def bound_of(rule):
    return lambda left, p: jnp.where(rule._keeps(p), jnp.inf, 0)


def test_distortion_without_branch_choice_is_too_small(report, monkeypatch):
    """Planted bug: no distortion is added if the branch was chosen by the nodes below it."""

    def forgetful(*arguments):
        verdict = accept_longest(*arguments)
        honest = jnp.where(verdict.distortion >= 1, verdict.distortion - 1, verdict.distortion)
        return dataclasses.replace(verdict, distortion=honest)

    accept_longest = lossy.accept_longest
    monkeypatch.setattr(lossy, "accept_longest", forgetful)
    texts, planted = of_longest("3-1", True)
    report(texts=f"{texts:.3f}", planted=f"{planted:.3f}")
    assert texts > planted + 0.05


@pytest.mark.parametrize("rule", [pytest.param(jspec.Lenient(0.5), marks=pytest.mark.slow), jspec.Typical(0.5, 0.9)])
def test_tree_distortion_bounds_distance_over_several_rounds(report, rule):
    """The distortion bounds the distance in the shipped program, for four tokens that depend on the previous one."""
    target, draft = toys.markov_pair(3, vocab_size=4, scale=1.5)
    law = oracle.softmax(np.asarray(target.table, float))
    joint = oracle.joint_law(lambda text: law[text[-1] if text else 2], 4, 4)
    draws, drafter = 20_000, TreeDrafter(BigramDrafter(jnp.log(jax.nn.softmax(draft.table))), Tree.branching((2, 2)))
    batch = np.full((draws, 1), 2), np.ones(draws, int), jax.random.split(jax.random.key(1), draws)
    out = drafters.generate(target, drafter, batch, max_new_tokens=4, accept=rule)
    counts = np.bincount(out.tokens @ [64, 16, 4, 1], minlength=256)
    distance, paid = np.abs(counts / draws - joint).sum() / 2, float(out.stats.distortion.mean())
    noise = np.sqrt(2 / np.pi * joint / draws).sum() / 2
    report(distance_of_texts=f"{distance:.3f}", mean_receipt=f"{paid:.3f}", sampling_noise=f"{noise:.3f}")
    assert 3 * noise < distance <= paid + 4 * noise


def test_shared_factor_is_smallest_sufficient(report):
    """The factor matches a bisection in float64 NumPy of K-SEQ's equation, 1 - (1 - b)^k = rho b (Sun et al. 2023)."""
    rng, rows = np.random.default_rng(0), 300
    p, q = random_laws(rng, (rows, 6)), random_laws(rng, (rows, 6))
    q, count = (q + rng.random((rows, 1)) * p) / (1 + rng.random((rows, 1))), rng.integers(1, 5, rows)
    q = q / q.sum(1, keepdims=True)
    found = np.asarray(shared_factor(jnp.float32(p), jnp.float32(q), jnp.asarray(count), 4))
    low, high = np.ones(rows), count.astype(float)
    for _ in range(60):
        middle = (low + high) / 2
        b = np.minimum(q, p / middle[:, None]).sum(1)
        enough = (1 - (1 - b) ** count <= middle * b) | (b == 0)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    touching = np.minimum(p, q).sum(1) > 1e-6
    report(rows=int(touching.sum()), largest_error=f"{np.abs(found - high)[touching].max():.1e}")
    np.testing.assert_allclose(found[touching], high[touching], atol=2e-5)
    assert (found >= 1).all() and (found <= count).all()


@pytest.mark.parametrize("change", ["children without replacement", "a factor that is too small"])
def test_planted_bugs_of_k_seq_are_caught(report, monkeypatch, change):
    tree, vocab_size = CASES["two children"]
    if change == "a factor that is too small":
        monkeypatch.setattr(k_seq, "shared_factor", lambda *args: 0.95 * shared_factor(*args))
    worst = walk.error(tree, vocab_size, change != "children without replacement", "k-seq")
    report(largest_error=f"{worst:.1e}")
    assert worst > 1e-3


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24])
def test_degenerate_siblings_give_no_nan_and_no_impossible_token(u):
    """Two children share one distribution; p and q may be invalid or equal, and tokens may be impossible."""
    kinds, draft, target_probs = degenerate_rows(np.random.default_rng(2), 2_000)
    draft = Draft(draft.tokens[:, :1].repeat(2, 1), draft.probs[:, :1].repeat(2, 1), Tree((0, 0)))
    kept, rest = jax.jit(verify_siblings)(jnp.full(draft.tokens.shape, u, jnp.float32), draft, target_probs)
    law = np.asarray(residual_at(jnp.zeros(len(kinds), jnp.int32), rest, target_probs))
    p, token = np.nan_to_num(np.asarray(target_probs[:, 0])), np.asarray(draft.tokens[:, :1])
    assert np.isfinite(law).all() and not ((law > 0) & (p <= 0)).any()
    assert not (np.asarray(kept) & (np.take_along_axis(p, token, 1) <= 0)).any()
    q = np.take_along_axis(np.asarray(draft.probs[:, 0]), token, 1)[:, 0]
    assert np.asarray(kept)[(np.array(kinds) == "p == q") & (q > 0)].all()


@pytest.mark.parametrize(("name", "same"), [("k-seq", "rejection"), ("traversal", "block")])
def test_tree_rule_on_chain_equals_chain_rule(name, same):
    kinds, draft, target_probs = degenerate_rows(np.random.default_rng(3), 500)
    keys, start = jax.random.split(jax.random.key(1), len(kinds)), jnp.arange(len(kinds))
    ours, theirs = (RULES[rule].accept(keys, start, draft, target_probs) for rule in (name, same))
    np.testing.assert_array_equal(ours.num_accepted, theirs.num_accepted)
    np.testing.assert_array_equal(ours.next_token, theirs.next_token)


def test_k_seq_accepts_more_with_more_children(report):
    """The chance that one of k children is kept lies between that of a single child and that of optimal transport."""
    rng, kept = np.random.default_rng(1), {}
    p, q = random_laws(rng, (200, 6)), random_laws(rng, (200, 6))
    for count in (1, 2, 4, 8):
        factor = np.asarray(shared_factor(jnp.asarray(p), jnp.asarray(q), jnp.full(200, count), count), float)
        kept[count] = 1 - (1 - np.minimum(q, p / factor[:, None]).sum(1)) ** count
    bound = {count: np.minimum(p, 1 - (1 - q) ** count).sum(1) for count in kept}
    report(**{f"k={count}": f"{rate.mean():.3f} of {bound[count].mean():.3f}" for count, rate in kept.items()})
    assert all((kept[count] >= kept[fewer] - 1e-5).all() for fewer, count in ((1, 2), (2, 4), (4, 8)))
    assert all((kept[count] <= bound[count] + 1e-5).all() for count in kept)
    assert all((kept[count] >= (1 - 1 / np.e) * bound[count] - 1e-5).all() for count in kept)
