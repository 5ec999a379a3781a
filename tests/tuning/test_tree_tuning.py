"""The choice of a draft tree: proposals are arithmetic, and measurements on a fake machine decide."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec import theory
from jspec.core.tree import Tree
from jspec.tuning import tune as auto
from jspec.tuning import tune_chain as tuning
from jspec.tuning import tune_tree as tree_tuning
from support import toys
from support.tuned import made

pytestmark = pytest.mark.usefixtures("quick_compile")
RATES = np.array([0.5, 0.25, 0.0625, 0.0625, 0, 0, 0, 0])  # of children, by rank
FAN, ROW, STEP = 1.0, 1 / 64, 1 / 8


def cost(setting, plain=1.0):
    """Return a round's seconds; a row in a draft step costs as much as a target's row, times step over plain."""
    if setting == 0:
        return plain
    tree = Tree.chain(setting) if isinstance(setting, int) else setting
    widths = [int((tree.offsets == depth).sum()) for depth in range(1, tree.max_depth)]
    return FAN + ROW * (tree.size - 1) + sum(STEP + ROW * STEP / plain * (width - 1) for width in widths)


class Machine:
    """A machine that plays 1,024 rounds, in which nodes are accepted at the rates in `RATES`."""

    def __init__(self, dear=1.0):
        self.now, self.dear, self.played = 0.0, dear, []

    def run(self, setting, limit, trial):
        self.played.append(setting)
        rounds = 8 * limit
        self.now += rounds * cost(setting) * (self.dear if isinstance(setting, Tree) else 1)
        if setting == 0:
            return made([[(0, "b")] * rounds], 0)
        tree = Tree.chain(setting) if isinstance(setting, int) else setting
        reached = np.array([self.chance(tree, depth) for depth in range(1, tree.max_depth + 1)] + [0.0])
        counts = np.round(rounds * -np.diff(reached, prepend=1.0)).astype(int)
        ends = "c" * tree.max_depth + "b"
        return made([[(n, ends[n]) for n, count in enumerate(counts) for _ in range(count)]], tree.max_depth)

    @staticmethod
    def chance(tree, depth):
        """Return the probability that a round accepts a node of this depth."""
        worth = np.ones(tree.size + 1)
        for node, parent in enumerate(tree.parents, 1):
            worth[node] = worth[parent] * RATES[np.flatnonzero(tree.children[parent] == node)[0]]
        return worth[tree.offsets == depth].sum()


@pytest.fixture
def machine(monkeypatch):
    def start(**options):
        made = Machine(**options)
        monkeypatch.setattr(tuning, "perf_counter", lambda: made.now)
        monkeypatch.setattr(tuning, "_PATIENCE", np.inf)
        return made

    return start


def chains(max_draft_tokens=4):
    tokens = [float(theory.expected_tokens(RATES[0], k)) for k in range(1, max_draft_tokens + 1)]
    seconds = [cost(k) for k in range(1, max_draft_tokens + 1)]
    return tuning.Tuning(*tuning.best_length(1.0, seconds, tokens), 1.0, tuple(seconds), tuple(tokens))


def test_fastest_tree_is_found(machine):
    """The tree is the fastest of all that could be proposed, and its speed is the one measured on the machine."""
    before = chains()
    found = tree_tuning.with_trees(machine().run, before, 128, 16, 8)
    worth = {tree: theory.tree_yield(tree, RATES) / cost(tree) for tree in tree_tuning._trees(RATES, 16, 4)}
    assert found.tree == max(worth, key=worth.__getitem__) and not found.tree.is_chain
    assert found.tree_speedup == pytest.approx(worth[found.tree], rel=0.01) and found.tree_speedup > before.speedup
    assert dataclasses.replace(found, tree=None, tree_speedup=0.0) == before


def test_tuning_measures_fans_then_proposals(machine):
    one = machine()
    tree_tuning.with_trees(one.run, chains(), 128, 16, 8)
    fans, proposed = [1, *(Tree.branching((n,)) for n in (2, 4, 8))], list(dict.fromkeys(one.played))[4:]
    assert list(dict.fromkeys(one.played))[:4] == fans and proposed[0] == chains().num_draft_tokens
    assert len(proposed) == 4 and all(tree.size <= 16 and tree.max_depth <= 4 for tree in proposed[1:])


@pytest.mark.parametrize(("third", "best"), [(1.1, 3), (1.5, 4), (1.5, 0)])
def test_interpolated_best_length_is_verified(machine, monkeypatch, third, best):
    """Three draft tokens seem best, and playing them confirms it or not; drafting need not pay at all."""
    costs = {0: 1.8 if best else 0.5, 1: 1.0, 2: 1.05, 3: third, 4: 1.15}
    monkeypatch.setitem(globals(), "cost", costs.__getitem__)
    one = machine()
    found = tuning.measure(one.run, 128, 4)
    assert found.num_draft_tokens == best and (3 in one.played) == (best > 0)
    assert found.round_seconds == pytest.approx([1.0, 1.05, third if best else 1.1, 1.15])
    assert found.speedup == pytest.approx(theory.expected_tokens(0.5, best) * costs[0] / costs[best], rel=0.01)


def test_chain_is_kept_if_trees_are_slower(machine):
    """The chain stays if tree rounds take three times as long as the cost model can know."""
    assert tree_tuning.with_trees(machine(dear=3.0).run, chains(), 128, 16, 8) == chains()


def test_fitted_costs_match_machine():
    found = tree_tuning._fit(chains(), [1, 2, 4], [cost(Tree.branching((count,))) for count in (1, 2, 4)])
    for tree in (Tree.chain(3), Tree.branching((3, 2, 1)), Tree((0, 0, 1, 1, 3))):
        assert found.of_round(tree) == pytest.approx(cost(tree))


def test_acceptance_by_rank_splits_gain_of_fan():
    np.testing.assert_allclose(tree_tuning._by_rank([1, 2, 4], np.array([0.5, 0.75, 0.85])), [0.5, 0.25, 0.05, 0.05])


@pytest.mark.parametrize("rule", ["rejection", "coupled", "traversal"])
@pytest.mark.slow
def test_tune_measures_trees(rule, monkeypatch):
    """If the draft is the target, a tree is as good as a chain and no better."""
    target, _ = toys.markov_pair(0)
    played = []
    monkeypatch.setattr(tuning, "TRIALS", 1)
    monkeypatch.setattr(
        auto,
        "run_program",
        lambda *arguments, run=auto.run_program: (
            played.append((arguments[1], arguments[-1].rule)),
            run(*arguments),
        )[1],
    )
    batch = np.zeros((2, 3), int), np.array([3, 1]), jax.random.split(jax.random.key(0), 2)
    found = jspec.tune(target, jspec.ModelDrafter(target), *batch, max_new_tokens=24, max_draft_tokens=2, accept=rule)
    assert found.expected_tokens == (2, 3)
    trees = {drafter.tree for drafter, used in played if isinstance(drafter, jspec.TreeDrafter)}
    assert {Tree.branching((n,)) for n in (2, 4, 8)} <= trees and len(trees) <= 6


def test_predicted_yield_equals_theory_if_depths_are_alike():
    tokens = [float(theory.expected_tokens(RATES[0], k)) for k in range(1, 4)]
    for tree in (Tree.chain(3), Tree.branching((4, 2, 1)), Tree((0, 0, 1, 1, 3))):
        assert tree_tuning._foreseen(tree, tokens, RATES) == pytest.approx(theory.tree_yield(tree, RATES))


def test_counted_yield_is_weighted_by_sample_size():
    few, many = ([made([[(1, "b"), (0, "c"), (1, "b")] * count], 1)] for count in (1, 1000))
    middle = (1.5 + 5 / 3) / 2
    assert middle < tuning.weighed(1.5, few) < middle + 0.01 < 1.65 < tuning.weighed(1.5, many) < 5 / 3
    assert tuning.weighed(1.5, few * 1000) == tuning.weighed(1.5, few)  # greedy trials repeat one text
    assert tuning.weighed(1.5, [made([[(1, "b")] * 9], 1)]) == 2.0  # without variance there is no doubt


@pytest.mark.parametrize(("rule", "replacement"), [("k-seq", True), ("rejection", False)])
def test_children_are_drawn_as_the_rule_requires(rule, replacement, monkeypatch):
    drawn, (target, other) = [], toys.markov_pair(0)
    monkeypatch.setattr(auto, "run_program", lambda *arguments: drawn.append(arguments[1].replacement))
    monkeypatch.setattr(auto, "measure", lambda *_: None)
    monkeypatch.setattr(auto, "with_trees", lambda run, *_: run(Tree.branching((2,)), 8, 0))
    batch = np.zeros((1, 3), int), np.array([3]), jax.random.split(jax.random.key(0), 1)
    jspec.tune(target, jspec.ModelDrafter(other), *batch, accept=rule)
    assert drawn == [replacement]


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        (jspec.NGramDrafter(), {}),
        (None, {"accept": "block"}),
        (None, {"max_nodes": 0}),
    ],
    ids=["cannot branch", "rule of chains", "not wanted"],
)
def test_only_chains_are_measured_if_trees_are_impossible(draft, options, monkeypatch):
    target, other = toys.markov_pair(0)
    monkeypatch.setattr(auto, "with_trees", lambda *_: pytest.fail("trees are tried"))
    batch = np.zeros((1, 3), int), np.array([3]), jax.random.split(jax.random.key(0), 1)
    found = jspec.tune(
        target, draft or jspec.ModelDrafter(other), *batch, max_new_tokens=16, max_draft_tokens=1, **options
    )
    assert found.tree is None


@pytest.mark.parametrize("value", [-1, 2.0, True, "8"])
def test_invalid_max_nodes_is_rejected(value):
    target, draft = toys.markov_pair(0)
    batch = np.zeros((1, 3), int), np.array([3]), jax.random.split(jax.random.key(0), 1)
    with pytest.raises(ValueError, match=r"at least 0 \(0 measures chains only\); got"):
        jspec.tune(target, jspec.ModelDrafter(draft), *batch, max_nodes=value)
