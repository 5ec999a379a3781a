"""A fixed acceptance rate for models with random weights. Every pass and draw is real, but the text is meaningless."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.rules import (
    Draft,
    Purpose,
    Rule,
    Verdict,
    end_of,
    follow,
    length_of_prefix,
    next_probs,
    positions_from,
    sample,
    stream,
    uniform,
)


@dataclasses.dataclass(frozen=True)
class Synthetic(Rule):
    """A rule that accepts draft tokens at given rates, whatever the tokens are.

    Attributes:
        by_rank: how often the child of each rank is accepted if its parent is, from rank 0 on. Children of higher ranks
            are never accepted.
    """

    by_rank: tuple[float, ...]
    exact: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False
    branches: ClassVar[bool] = True

    def __str__(self) -> str:
        return " ".join(["synthetic", *(f"{rate:g}" for rate in self.by_rank)])

    def accept(self, keys: Array, start: Array, draft: Draft, target_probs: Array) -> Verdict:
        tree = draft.static_tree
        uniforms = uniform(stream(keys, positions_from(start, tree.max_depth), Purpose.ACCEPT))
        rates = np.array([*self.by_rank, *[0.0] * tree.max_children])
        ends, ranks = np.cumsum(rates), tree.sibling_ranks[1:]
        of_node = uniforms[:, tree.offsets[1:] - 1]  # siblings share this number, so that at most one is accepted
        kept = (of_node >= (ends - rates)[ranks]) & (of_node < ends[ranks])
        if tree.is_chain:
            accepted, path = length_of_prefix(kept), None
            law = next_probs(accepted, draft, target_probs)
        else:
            accepted, path = follow(kept, tree)
            law = jnp.take_along_axis(target_probs, end_of(accepted, path)[:, None, None], axis=1)[:, 0]
        return Verdict(accepted, sample(stream(keys, start + accepted, Purpose.TARGET), law), path=path)
