# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryIsInstance=false
"""The shape of a draft: which guess follows which. A chain is the tree with one branch.

Nodes are numbered from 1, parents before their children; node 0 is the last committed token, which all guesses follow.
Token n - 1 of a draft stands at node n. Siblings are ordered: where they are drawn one after another without the tokens
before, the elder ones are judged first.
"""

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["offsets", "visible"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Branches:
    """How the S tokens of one pass hang together, where they do not simply follow one another.

    They belong to a tree whose node 0 stands at a row's position ``start``; the pass may read a part of it, its last S
    nodes so far. Slots are filled in the order of nodes, positions go by depth, and a token sees, besides all before
    ``start``, what comes before it on its own branch.

    Attributes:
        offsets: ``int32[S]`` or ``int32[B, S]``, positions relative to ``start``: depths in the tree.
        visible: ``bool[S, R]`` or ``bool[B, S, R]``, which of the R >= S nodes so far each of the last S sees.
    """

    offsets: Array | np.ndarray
    visible: Array | np.ndarray

    @property
    def read(self) -> int:
        """How many nodes an earlier pass has read: R - S."""
        return self.visible.shape[-1] - self.visible.shape[-2]

    @staticmethod
    def places(start: Array, size: int, branches: "Branches | None") -> tuple[Array, Array]:
        """Slots and positions ``int32[B, S]`` of a pass of `size` tokens, whose node 0 or first token is at `start`."""
        slots = start[:, None] + jnp.arange(size)[None]
        if branches is None:
            return slots, slots
        return slots + branches.read, start[:, None] + jnp.atleast_2d(branches.offsets)

    @staticmethod
    def argument(branches: "Branches | None") -> dict[str, "Branches"]:
        """What a pass over them adds to a model's arguments: nothing for a chain, which every model can read."""
        return {} if branches is None else {"branches": branches}


def _is_whole(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tree:
    """A tree of guesses, known before the program runs: hashable, for it is part of the program.

    Attributes:
        parents: ``parents[n - 1]`` is the parent of node n.

    Raises:
        ValueError: it is no tree, or a node comes before its parent.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "parents", tuple(self.parents))
        except TypeError:
            raise ValueError(f"parents must be a sequence of ints; got {self.parents!r}.") from None
        for node, parent in enumerate(self.parents, 1):
            if not _is_whole(parent):
                raise ValueError(f"The parent of node {node} must be an int; got {parent!r}.")
            if not 0 <= parent < node:
                raise ValueError(f"The parent of node {node} must be one of the nodes before it, 0 to {node - 1} (0 is "
                                 f"the last committed token); got {parent}.")  # fmt: skip
        object.__setattr__(self, "parents", tuple(int(parent) for parent in self.parents))

    @classmethod
    def chain(cls, num_draft_tokens: int) -> "Tree":
        """Each node follows the one before."""
        if not _is_whole(num_draft_tokens) or num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be an int of at least 0; got {num_draft_tokens!r}.")
        return cls(tuple(range(num_draft_tokens)))

    @classmethod
    def branching(cls, children: Sequence[int]) -> "Tree":
        """Every node of depth d has ``children[d]`` children: (3, 2, 1) has 3 + 6 + 6 nodes."""
        if not isinstance(children, Sequence):
            raise ValueError(f"children must be a sequence of ints, one a level, such as (3, 2, 1); got {children!r}.")
        for count in children:
            if not _is_whole(count) or count < 1:
                raise ValueError(f"Every number of children must be an int of at least 1; got {count!r}.")
        parents: list[int] = []
        level, size = [0], 1
        for count in children:
            parents += [parent for parent in level for _ in range(count)]
            level = list(range(size, size + len(level) * count))
            size += len(level)
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """N, how many guesses there are."""
        return len(self.parents)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """``int32[N + 1]``, the depth of every node: its position after that of node 0."""
        depths = np.zeros(self.size + 1, np.int32)
        for node, parent in enumerate(self.parents, 1):
            depths[node] = depths[parent] + 1
        return depths

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """``bool[N + 1, N + 1]``: row n has the nodes that node n sees, itself and those before it on its branch."""
        above = np.eye(self.size + 1, dtype=bool)
        for node, parent in enumerate(self.parents, 1):
            above[node] |= above[parent]
        return above

    @functools.cached_property
    def children(self) -> np.ndarray:
        """``int32[N + 1, C]``, the children of every node, the eldest first, and 0 where there are no more."""
        lists: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents, 1):
            lists[parent].append(node)
        most = max(map(len, lists))
        return np.array([nodes + [0] * (most - len(nodes)) for nodes in lists], np.int32).reshape(self.size + 1, most)

    @functools.cached_property
    def paths(self) -> np.ndarray:
        """``int32[N + 1, max_depth]``: the nodes from depth 1 on down to every node, then 0."""
        paths = np.zeros((self.size + 1, self.max_depth), np.int32)
        for node, depth in enumerate(self.offsets):
            paths[node, :depth] = np.flatnonzero(self.ancestors[node])[1:]
        return paths

    @functools.cached_property
    def sibling_ranks(self) -> np.ndarray:
        """``int32[N + 1]``: how many elder siblings each has."""
        parents = np.array((-1, *self.parents))
        return np.tril(parents[:, None] == parents, -1).sum(1, dtype=np.int32)

    @functools.cached_property
    def rank_at_depth(self) -> np.ndarray:
        """``int32[N + 1]``: how many nodes of the same depth come before each."""
        same = self.offsets[:, None] == self.offsets
        return np.tril(same, -1).sum(1, dtype=np.int32)

    @property
    def max_depth(self) -> int:
        """K: the most guesses that can be accepted."""
        return int(self.offsets.max())

    @property
    def max_children(self) -> int:
        """C: 1 for a chain, 0 for no guess at all."""
        return self.children.shape[1]

    @property
    def max_width(self) -> int:
        """The most nodes of one depth, each of which is drawn with noise of its own."""
        return int(self.rank_at_depth.max()) + 1

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the one before."""
        return self.parents == tuple(range(self.size))

    def by_depth(self) -> "Tree":
        """The same tree, numbered level by level; siblings keep their order."""
        numbered = [0]
        parents: list[int] = []
        for place, node in enumerate(numbered):  # grows as it is read
            children = self.children[node][self.children[node] > 0]
            parents += [place] * len(children)
            numbered += children.tolist()
        return Tree(tuple(parents))

    @property
    def branches(self) -> Branches | None:
        """All of it, node 0 too, read in one pass; of a chain it is nothing special."""
        return None if self.is_chain else Branches(self.offsets, self.ancestors)

    def level(self, depth: int) -> "Level":
        """The nodes of one depth, in a tree that is numbered by depth."""
        nodes, above = np.flatnonzero(self.offsets == depth), np.flatnonzero(self.offsets == depth - 1)
        parents = np.array([self.parents[node - 1] for node in nodes]) - above[0]
        return Level(depth, parents, Branches(self.offsets[nodes], self.ancestors[nodes][:, : nodes[-1] + 1]))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parents"], meta_fields=["size", "max_depth"])
@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A tree for each row, known only when it is drafted; of one size, so that the program stays the same.

    Attributes:
        parents: ``int32[B, N]``, as in `Tree`; None where only the size is meant.
        size: N.
        max_depth: of any row.
    """

    parents: Array | None
    size: int
    max_depth: int
    is_chain = False
    max_children = max_width = 1  # with noise of their own: only a rule that shares the target's judges it

    @property
    def ancestors(self) -> Array:
        """``bool[B, N + 1, N + 1]``, as of `Tree`."""
        assert self.parents is not None
        own = jnp.eye(self.size + 1, dtype=bool)
        reached = jnp.broadcast_to(own, (len(self.parents), *own.shape))
        above = jnp.pad(self.parents, ((0, 0), (1, 0)))[..., None]  # node 0 counts as its own parent
        for _ in range(self.max_depth):
            reached = own[None] | jnp.take_along_axis(reached, above, axis=1)
        return reached

    @property
    def offsets(self) -> Array:
        """``int32[B, N + 1]``, as of `Tree`."""
        return self.ancestors.sum(-1, dtype=jnp.int32) - 1

    @property
    def branches(self) -> Branches:
        """All of it, node 0 too, read in one pass."""
        return Branches(self.offsets, self.ancestors)


@dataclasses.dataclass(frozen=True)
class Level:
    """The drafted tokens of one depth, which a drafter reads in one pass to go on behind them.

    Attributes:
        depth: 1 for those that follow the last committed token; traced in a chain, whose levels are a loop.
        parents: ``int[S]`` or ``int[B, S]``, which of the level before each follows; None in a chain, where both have
            one token.
        branches: how they hang together with those before; None in a chain.
    """

    depth: Array | int
    parents: np.ndarray | Array | None = None
    branches: Branches | None = None

    def of_parents(self, values: Array) -> Array:
        """``[B, S, ...]``, of every token what ``values[B, R, ...]`` has of the one in the level before it."""
        if self.parents is None:
            return values
        if self.parents.ndim == 1:
            return values[:, self.parents]
        at = jnp.asarray(self.parents).reshape(*self.parents.shape, *[1] * (values.ndim - 2))
        return jnp.take_along_axis(values, at, axis=1)

    def start(self, lengths: Array) -> Array:
        """``int32[B]``, where a pass over them starts (`Llama.forward`) behind ``lengths[B]`` committed tokens."""
        return lengths - 1 if self.branches is not None else lengths + self.depth - 1
