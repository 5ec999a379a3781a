"""The tree to draft, if one beats the best chain: proposed by predicted costs and yields, chosen by measurement.

A fan is a tree of two, four or up to the allowed number of drafts for one token. Fans show how often a child of each
rank is accepted, and what rows cost. The trees that should then be fastest (`jspec.theory.best_tree`) run in turns with
the best chain. A few hundred rounds measure well what a round costs, and badly what it yields: the luckiest of several
trees would win. So the yield of a tree is a weighted mean of count and prediction.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from jspec import theory
from jspec.core.tree import Tree
from jspec.drafters.draft_length import doubling
from jspec.tuning.tune_chain import Run, Setting, Tuning, acceptance_rates, in_turns, weighed

_FANS = 1, 2, 4  # numbers of children; the largest allowed one is added
_WIDEST = 16  # each child of a fan adds code of its own
_CANDIDATES = 3


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of rounds and passes, by straight lines through the measurements.

    Attributes:
        children: the number of children of every fan.
        fans: the seconds of a round that drafts that many tokens for one position and verifies them.
        step: the seconds of one more pass of the draft.
        share: the cost of one more row in such a pass, as a fraction of that of one more row in a round.
    """

    children: tuple[int, ...]
    fans: tuple[float, ...]
    step: float
    share: float

    def of_round(self, tree: Tree) -> float:
        """Return the seconds of a round that drafts `tree`."""
        widths = np.bincount(tree.offsets)[1:-1]  # the last level is not read
        passes = len(widths) * self.step + self.share * float((self.of_rows(widths) - self.fans[0]).sum())
        return passes + float(self.of_rows(tree.size))

    def of_rows(self, rows: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of a round with one pass of the draft and that many draft tokens."""
        slope = (self.fans[-1] - self.fans[-2]) / (self.children[-1] - self.children[-2]) if len(self.fans) > 1 else 0.0
        beyond = np.maximum(np.asarray(rows) - self.children[-1], 0)
        return np.interp(rows, self.children, self.fans) + slope * beyond


def with_trees(run: Run, chains: Tuning, max_new_tokens: int, max_nodes: int, vocab_size: int) -> Tuning:
    """Return `chains` with the tree of at most `max_nodes` drafts that is faster than all chains, if there is one."""
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
    """Return the acceptance rate of the child of each rank, and the costs of rounds, from fans of up to `most`."""
    from scipy.optimize import isotonic_regression  # imported here, so that decoding does not wait for it

    children = sorted({count for count in (*_FANS, min(most, _WIDEST)) if count <= most})
    played: list[Setting] = [1, *(Tree.branching((count,)) for count in children[1:])]
    seconds, outs = in_turns(run, played, max_new_tokens)
    accepted = isotonic_regression([float(acceptance_rates(outs[fan])[0]) for fan in played]).x
    rising = isotonic_regression(list(seconds.values())).x  # more rows never cost less
    return _by_rank(children, accepted), _fit(chains, children, rising.tolist())


def _by_rank(children: list[int], accepted: np.ndarray) -> np.ndarray:
    """Return how often the child of each rank is accepted.

    The children that a fan adds to the one before share equally what it gains.
    """
    added = np.diff(children, prepend=0)
    return np.repeat(np.diff(accepted, prepend=0.0) / added, added)


def _fit(chains: Tuning, children: list[int], seconds: list[float]) -> Costs:
    """Return costs from fans, which differ by rows, and the longest chain, which adds draft passes to its rows."""
    longest, costs = len(chains.round_seconds), Costs(tuple(children), tuple(seconds), 0.0, 0.0)
    step = max(0.0, chains.round_seconds[-1] - float(costs.of_rows(longest))) / max(1, longest - 1)
    return dataclasses.replace(costs, step=step, share=min(1.0, step / chains.plain_seconds))


def _candidates(rates: np.ndarray, costs: Costs, max_nodes: int, max_depth: int) -> list[Tree]:
    """Return the trees that should be fastest, without chains."""
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
    """Return the predicted tokens of a round over `tree`.

    Eldest children are accepted as in a chain at their depth. If the eldest is rejected, the others are accepted as in
    a fan.
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
