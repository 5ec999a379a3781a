# pyright: reportUnnecessaryIsInstance=false
"""Draft trees, which define the token that each draft token follows. A chain is a tree with one branch.

Nodes are numbered from 1, with parents before their children. Node 0 is the last committed token, which all draft
tokens follow. Token n - 1 of a draft is at node n. Siblings are ordered: if they are sampled one after another without
replacement, they are verified in the same order.
"""

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@functools.partial(jax.tree_util.register_dataclass, data_fields=["offsets", "visible"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Branches:
    """The tree structure of one pass over S tokens that are not a simple sequence.

    The tokens belong to a tree whose node 0 is at a row's position ``start``. A pass may process only part of the tree:
    the last S of the nodes so far. Slots are filled in node order, while positions follow the depth. A token attends to
    everything before ``start`` and to the tokens before it on its own branch.

    Attributes:
        offsets: ``int32[S]`` or ``int32[B, S]``, positions relative to ``start``: depths in the tree.
        visible: ``bool[S, R]`` or ``bool[B, S, R]``: for each of the last S nodes, which of the R >= S nodes so far it
            attends to.
    """

    offsets: Array | np.ndarray
    visible: Array | np.ndarray

    @property
    def read(self) -> int:
        """The number of nodes that earlier passes processed: R - S."""
        return self.visible.shape[-1] - self.visible.shape[-2]

    @staticmethod
    def places(start: Array, size: int, branches: "Branches | None") -> tuple[Array, Array]:
        """Return the slots and positions, ``int32[B, S]`` each, of a pass over `size` tokens.

        `start` is the slot of node 0, or of the first token if there are no branches.
        """
        slots = start[:, None] + jnp.arange(size)[None]
        if branches is None:
            return slots, slots
        return slots + branches.read, start[:, None] + jnp.atleast_2d(branches.offsets)

    @staticmethod
    def argument(branches: "Branches | None") -> "BranchesArgument":
        """Return the extra arguments of a model's pass: none for a chain, which every model supports."""
        return {} if branches is None else {"branches": branches}


class BranchesArgument(TypedDict, total=False):
    """The argument `branches` of a model's pass, if there is one."""

    branches: Branches


def _is_whole(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Integral)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tree:
    """A draft tree that is fixed when the program is compiled. It is hashable, because it is a static argument.

    Attributes:
        parents: ``parents[n - 1]`` is the parent of node n.

    Raises:
        ValueError: `parents` is not a tree, or a node comes before its parent.
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
                raise ValueError(
                    f"The parent of node {node} must be one of the nodes before it, 0 to {node - 1} (0 is "
                    f"the last committed token); got {parent}."
                )
        object.__setattr__(self, "parents", tuple(int(parent) for parent in self.parents))

    @classmethod
    def chain(cls, num_draft_tokens: int) -> "Tree":
        """Return the tree in which each node follows the previous node."""
        if not _is_whole(num_draft_tokens) or num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must be an int of at least 0; got {num_draft_tokens!r}.")
        return cls(tuple(range(num_draft_tokens)))

    @classmethod
    def branching(cls, children: Sequence[int]) -> "Tree":
        """Return a tree whose nodes at depth d have ``children[d]`` children each; (3, 2, 1) makes 3 + 6 + 6 nodes."""
        if not isinstance(children, Sequence):
            raise ValueError(
                f"children must be a sequence of ints, one per level, such as (3, 2, 1); got {children!r}."
            )
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
        """N, the number of draft tokens."""
        return len(self.parents)

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """The depth of every node, ``int32[N + 1]``: its position relative to that of node 0."""
        depths = np.zeros(self.size + 1, np.int32)
        for node, parent in enumerate(self.parents, 1):
            depths[node] = depths[parent] + 1
        return depths

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """The ancestors of every node, and the node itself: row n of ``bool[N + 1, N + 1]`` marks those of node n."""
        above = np.eye(self.size + 1, dtype=bool)
        for node, parent in enumerate(self.parents, 1):
            above[node] |= above[parent]
        return above

    @functools.cached_property
    def children(self) -> np.ndarray:
        """The children of every node in order, ``int32[N + 1, C]``, padded with 0."""
        lists: list[list[int]] = [[] for _ in range(self.size + 1)]
        for node, parent in enumerate(self.parents, 1):
            lists[parent].append(node)
        most = max(map(len, lists))
        return np.array([nodes + [0] * (most - len(nodes)) for nodes in lists], np.int32).reshape(self.size + 1, most)

    @functools.cached_property
    def paths(self) -> np.ndarray:
        """The path from depth 1 to every node, ``int32[N + 1, max_depth]``, padded with 0."""
        paths = np.zeros((self.size + 1, self.max_depth), np.int32)
        for node, depth in enumerate(self.offsets):
            paths[node, :depth] = np.flatnonzero(self.ancestors[node])[1:]
        return paths

    @functools.cached_property
    def sibling_ranks(self) -> np.ndarray:
        """The number of earlier siblings of every node, ``int32[N + 1]``."""
        parents = np.array((-1, *self.parents))
        return np.tril(parents[:, None] == parents, -1).sum(1, dtype=np.int32)

    @functools.cached_property
    def rank_at_depth(self) -> np.ndarray:
        """The number of earlier nodes at the same depth as each node, ``int32[N + 1]``."""
        same = self.offsets[:, None] == self.offsets
        return np.tril(same, -1).sum(1, dtype=np.int32)

    @property
    def max_depth(self) -> int:
        """K, the largest number of draft tokens that can be accepted."""
        return int(self.offsets.max())

    @property
    def max_children(self) -> int:
        """C, the largest number of children: 1 for a chain, 0 for an empty draft."""
        return self.children.shape[1]

    @property
    def max_width(self) -> int:
        """The largest number of nodes at one depth, each of which is sampled with its own noise."""
        return int(self.rank_at_depth.max()) + 1

    @property
    def is_chain(self) -> bool:
        """Whether each node follows the previous node."""
        return self.parents == tuple(range(self.size))

    def by_depth(self) -> "Tree":
        """Return the same tree, numbered level by level; siblings keep their order."""
        numbered = [0]
        parents: list[int] = []
        for place, node in enumerate(numbered):  # the list grows during the loop
            children = self.children[node][self.children[node] > 0]
            parents += [place] * len(children)
            numbered += children.tolist()
        return Tree(tuple(parents))

    @property
    def branches(self) -> Branches | None:
        """The branches of a pass over the whole tree, node 0 included; None for a chain."""
        return None if self.is_chain else Branches(self.offsets, self.ancestors)

    def level(self, depth: int) -> "Level":
        """Return the nodes at one depth. The tree must be numbered by depth."""
        nodes, above = np.flatnonzero(self.offsets == depth), np.flatnonzero(self.offsets == depth - 1)
        parents = np.array([self.parents[node - 1] for node in nodes]) - above[0]
        return Level(depth, parents, Branches(self.offsets[nodes], self.ancestors[nodes][:, : nodes[-1] + 1]))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parents"], meta_fields=["size", "max_depth"])
@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """One tree per row, known only at drafting time. All trees have the same size, so the program is not recompiled.

    Attributes:
        parents: ``int32[B, N]``, same as in `Tree`; None if only the size matters.
        size: N.
        max_depth: the maximum depth over all rows.
    """

    parents: Array | None
    size: int
    max_depth: int
    is_chain = False
    max_children = max_width = 1  # nodes at one depth share noise; rules that do not share noise are rejected

    @property
    def ancestors(self) -> Array:
        """The nodes that each node attends to, ``bool[B, N + 1, N + 1]``, same as in `Tree`."""
        assert self.parents is not None
        own = jnp.eye(self.size + 1, dtype=bool)
        reached = jnp.broadcast_to(own, (len(self.parents), *own.shape))
        above = jnp.pad(self.parents, ((0, 0), (1, 0)))[..., None]  # node 0 counts as its own parent
        for _ in range(self.max_depth):
            reached = own[None] | jnp.take_along_axis(reached, above, axis=1)
        return reached

    @property
    def offsets(self) -> Array:
        """The depth of every node, ``int32[B, N + 1]``, same as in `Tree`."""
        return self.ancestors.sum(-1, dtype=jnp.int32) - 1

    @property
    def branches(self) -> Branches:
        """The branches of a pass over the whole tree, node 0 included."""
        return Branches(self.offsets, self.ancestors)


@dataclasses.dataclass(frozen=True)
class Level:
    """The draft tokens at one depth, which a drafter processes in one pass to draft the tokens after them.

    Attributes:
        depth: 1 for tokens that follow the last committed token. It is traced in a chain, whose levels run in a loop.
        parents: ``int[S]`` or ``int[B, S]``, each token's parent as an index into the previous level; None in a chain,
            whose levels have one token each.
        branches: the tree structure of these tokens and the earlier ones; None in a chain.
    """

    depth: Array | int
    parents: np.ndarray | Array | None = None
    branches: Branches | None = None

    def of_parents(self, values: Array) -> Array:
        """Return ``[B, S, ...]``, the entry of ``values[B, R, ...]`` at each token's parent in the previous level."""
        if self.parents is None:
            return values
        if self.parents.ndim == 1:
            return values[:, self.parents]
        at = jnp.asarray(self.parents).reshape(*self.parents.shape, *[1] * (values.ndim - 2))
        return jnp.take_along_axis(values, at, axis=1)

    def start(self, lengths: Array) -> Array:
        """Return ``int32[B]``, the `start` of a `Llama.forward` pass over the level after ``lengths[B]`` tokens."""
        return lengths - 1 if self.branches is not None else lengths + self.depth - 1
