"""Which tree to draft, if any beats the best chain: proposed by what rounds should cost and bring, chosen by measuring.

Fans of two, four and as many guesses for one token as a tree may have tell how often a child of each rank is accepted
and what so many rows cost. The trees that should then be fastest (`jspec.theory.best_tree`) are played in turns with
the best chain. Some hundred rounds measure well what a round costs, and badly what it brings: the luckiest of several
trees would win. So what a tree brings is weighed between what was counted and what was foreseen.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from jspec import theory
from jspec.core.tree import Tree
from jspec.drafters.draft_length import doubling
from jspec.tuning.tune_chain import Run, Setting, Tuning, acceptance_rates, in_turns, weighed

_FANS = 1, 2, 4  # children, and the most
_WIDEST = 16  # each child of a fan is some code of its own
_CANDIDATES = 3


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds, by straight lines through what was measured.

    Attributes:
        children: of every fan.
        fans: of a round that drafts so many guesses for one token and verifies them.
        step: of one more pass of the draft.
        share: of what one more row costs, that in such a pass.
    """

    children: tuple[int, ...]
    fans: tuple[float, ...]
    step: float
    share: float

    def of_round(self, tree: Tree) -> float:
        """Of a round that drafts `tree`."""
        widths = np.bincount(tree.offsets)[1:-1]  # the last level is not read
        passes = len(widths) * self.step + self.share * float((self.of_rows(widths) - self.fans[0]).sum())
        return passes + float(self.of_rows(tree.size))

    def of_rows(self, rows: int | NDArray[np.int64]) -> NDArray[np.float64]:
        """Of a round with one pass of the draft, and so many guesses."""
        slope = (self.fans[-1] - self.fans[-2]) / (self.children[-1] - self.children[-2]) if len(self.fans) > 1 else 0.0
        beyond = np.maximum(np.asarray(rows) - self.children[-1], 0)
        return np.interp(rows, self.children, self.fans) + slope * beyond


def with_trees(run: Run, chains: Tuning, max_new_tokens: int, max_nodes: int, vocab_size: int) -> Tuning:
    """`chains`, and the tree of at most `max_nodes` guesses that is faster than all of them, if there is one."""
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
    """How often the child of each rank is accepted, and what rounds cost, from fans of at most `most` guesses."""
    from scipy.optimize import isotonic_regression  # whoever decodes only need not wait for it

    children = sorted({count for count in (*_FANS, min(most, _WIDEST)) if count <= most})
    played: list[Setting] = [1, *(Tree.branching((count,)) for count in children[1:])]
    seconds, outs = in_turns(run, played, max_new_tokens)
    accepted = isotonic_regression([float(acceptance_rates(outs[fan])[0]) for fan in played]).x
    rising = isotonic_regression(list(seconds.values())).x  # more rows never cost less
    return _by_rank(children, accepted), _fit(chains, children, rising.tolist())


def _by_rank(children: list[int], accepted: np.ndarray) -> np.ndarray:
    """How often the child of each rank is accepted: what a fan has beyond the one before is shared by those it adds."""
    added = np.diff(children, prepend=0)
    return np.repeat(np.diff(accepted, prepend=0.0) / added, added)


def _fit(chains: Tuning, children: list[int], seconds: list[float]) -> Costs:
    """From fans, which differ by rows, and the longest chain, which has those and passes of the draft besides."""
    longest, costs = len(chains.round_seconds), Costs(tuple(children), tuple(seconds), 0.0, 0.0)
    step = max(0.0, chains.round_seconds[-1] - float(costs.of_rows(longest))) / max(1, longest - 1)
    return dataclasses.replace(costs, step=step, share=min(1.0, step / chains.plain_seconds))


def _candidates(rates: np.ndarray, costs: Costs, max_nodes: int, max_depth: int) -> list[Tree]:
    """Those that should be fastest, without chains."""
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
    """Tokens of a round over `tree`: eldest children are accepted as in a chain at their depth, the others where those
    are not, as in a fan."""
    reached = np.diff(chain_tokens, prepend=1.0)
    before = np.append(1.0, reached[:-1])
    eldest = np.divide(reached, before, out=np.zeros_like(before), where=before > 0)
    younger = rates / max(1.0 - rates[0], np.finfo(float).eps)
    worth = np.ones(tree.size + 1)
    for node, parent in enumerate(tree.parents, 1):
        first, rank = eldest[tree.offsets[node] - 1], tree.sibling_ranks[node]
        worth[node] = worth[parent] * (first if rank == 0 else (1.0 - first) * younger[rank])
    return float(worth.sum())
