"""The choice of a tree that is faster than the best chain, based first on predictions and then on measurements.

A fan is a tree with several draft tokens for one position: two, four, and the allowed maximum. Runs with fans measure
the acceptance rate of each child rank and the cost of rows. The trees with the highest predicted speed
(`jspec.theory.best_tree`) then take turns with the best chain. A few hundred rounds measure a round's cost well but its
yield poorly, so the luckiest of several trees would be chosen. Therefore, a tree's yield is a weighted mean of the
counted and the predicted number of tokens.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from jspec import theory
from jspec.core.tree import Tree
from jspec.drafters.draft_length import doubling
from jspec.tuning.tune_chain import Run, Setting, Tuning, acceptance_rates, in_turns, weighed

_FANS = 1, 2, 4  # numbers of children; the largest allowed number is added to them
_WIDEST = 16  # each child of a fan adds code to the program
_CANDIDATES = 3


@dataclasses.dataclass(frozen=True)
class Costs:
    """The durations of rounds and passes in seconds, interpolated linearly between the measurements.

    Attributes:
        children: the number of children in each fan.
        fans: the duration of a round that drafts that many tokens for one position and verifies them.
        step: the duration of one additional draft pass.
        share: the cost of an additional row in a draft pass, as a fraction of the cost of an additional row in a round.
    """

    children: tuple[int, ...]
    fans: tuple[float, ...]
    step: float
    share: float

    def of_round(self, tree: Tree) -> float:
        """Return the duration of a round that drafts `tree`, in seconds."""
        widths = np.bincount(tree.offsets)[1:-1]  # the drafter does not read the last level
        passes = len(widths) * self.step + self.share * float((self.of_rows(widths) - self.fans[0]).sum())
        return passes + float(self.of_rows(tree.size))

    def of_rows(self, rows: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the duration of a round with one draft pass and `rows` draft tokens, in seconds."""
        slope = (self.fans[-1] - self.fans[-2]) / (self.children[-1] - self.children[-2]) if len(self.fans) > 1 else 0.0
        beyond = np.maximum(np.asarray(rows) - self.children[-1], 0)
        return np.interp(rows, self.children, self.fans) + slope * beyond


def with_trees(run: Run, chains: Tuning, max_new_tokens: int, max_nodes: int, vocab_size: int) -> Tuning:
    """Return `chains`, plus the best tree of at most `max_nodes` draft tokens if it is faster than every chain."""
    rates, costs = fans(run, chains, max_new_tokens, min(max_nodes, vocab_size))
    trees = _candidates(rates, costs, max_nodes, len(chains.round_seconds))
    if not trees:
        return chains
    best: Setting = chains.num_draft_tokens
    seconds, outs = in_turns(run, (best, *trees), max_new_tokens)
    foreseen: dict[Setting, float] = {tree: _foreseen(tree, chains.expected_tokens, rates) for tree in trees}
    foreseen[best] = (1.0, *chains.expected_tokens)[chains.num_draft_tokens]
    speeds = {one: weighed(foreseen[one], outs[one]) / seconds[one] for one in seconds}
    tree = max(trees, key=speeds.__getitem__)
    if speeds[tree] <= speeds[best]:
        return chains
    return dataclasses.replace(chains, tree=tree, tree_speedup=chains.speedup * speeds[tree] / speeds[best])


def fans(run: Run, chains: Tuning, max_new_tokens: int, most: int) -> tuple[np.ndarray, Costs]:
    """Measure nodes with up to `most` children. Return the acceptance rate of each child rank and the round costs."""
    from scipy.optimize import isotonic_regression  # imported here so that decoding does not wait for this import

    children = sorted({count for count in (*_FANS, min(most, _WIDEST)) if count <= most})
    played: list[Setting] = [1, *(Tree.branching((count,)) for count in children[1:])]
    seconds, outs = in_turns(run, played, max_new_tokens)
    accepted = cast(np.ndarray, isotonic_regression([float(acceptance_rates(outs[fan])[0]) for fan in played]).x)
    rising = cast(np.ndarray, isotonic_regression(list(seconds.values())).x)  # additional rows never reduce the cost
    return _by_rank(children, accepted), _fit(chains, children, rising.tolist())


def _by_rank(children: list[int], accepted: np.ndarray) -> np.ndarray:
    """Return the acceptance rate of each child rank.

    A fan's gain in acceptance over the next smaller fan is divided equally among its additional children.
    """
    added = np.diff(children, prepend=0)
    return np.repeat(np.diff(accepted, prepend=0.0) / added, added)


def _fit(chains: Tuning, children: list[int], seconds: list[float]) -> Costs:
    """Fit costs to the fans, which differ in rows, and to the longest chain, which has additional draft passes."""
    longest, costs = len(chains.round_seconds), Costs(tuple(children), tuple(seconds), 0.0, 0.0)
    step = max(0.0, chains.round_seconds[-1] - float(costs.of_rows(longest))) / max(1, longest - 1)
    return dataclasses.replace(costs, step=step, share=min(1.0, step / chains.plain_seconds))


def _candidates(rates: np.ndarray, costs: Costs, max_nodes: int, max_depth: int) -> list[Tree]:
    """Return the trees with the highest predicted speed, excluding chains."""
    found = {
        tree: theory.tree_yield(tree, rates) / costs.of_round(tree) for tree in _trees(rates, max_nodes, max_depth)
    }
    return sorted(found, key=found.__getitem__, reverse=True)[:_CANDIDATES]


def _trees(rates: np.ndarray, max_nodes: int, max_depth: int) -> Iterator[Tree]:
    for nodes in doubling(max_nodes):
        for depth in range(1, min(nodes, max_depth) + 1):
            tree = theory.best_tree(rates, nodes, depth)
            if not tree.is_chain:
                yield tree


def _foreseen(tree: Tree, chain_tokens: Sequence[float], rates: NDArray[np.float64]) -> float:
    """Return the predicted number of tokens in a round that drafts `tree`.

    First children have the acceptance rate of a chain at their depth. If the first child is rejected, its siblings have
    the same acceptance rates as in a fan.
    """
    reached = np.diff(chain_tokens, prepend=1.0)
    before = np.append(1.0, reached[:-1])
    eldest = np.divide(reached, before, out=np.zeros_like(before), where=before > 0)
    younger = rates / max(1.0 - rates[0], np.finfo(float).eps)
    worth = np.ones(tree.size + 1)
    for node, parent in enumerate(tree.parents, 1):
        first, rank = eldest[tree.offsets[node] - 1], tree.sibling_ranks[node]
        worth[node] = worth[parent] * (first if rank == 0 else (1.0 - first) * younger[rank])
    return float(worth.sum())
