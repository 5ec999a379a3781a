"""What can be trained: for each kind of drafter its weights, and what it says of whole texts."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jspec.drafters import EagleDrafter
from jspec.training import eagle
from jspec.training.sight import Sight

Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trainee:
    """A drafter in training.

    Attributes:
        weights: those that are trained, in float32; a pytree of dicts.
        features: the target's states that it reads.
        draft_ids: ``int32[D]``, the tokens it can guess; None for all.
        offset: at position t it guesses the token ``t + 1 + offset``.
        unroll: of weights, target, ``tokens[B, S]`` and `Sight`, for a number of depths, the logits ``[B, S', D]``.
        drafter: what decodes with such weights.
    """

    weights: Weights
    features: tuple[int, ...]
    draft_ids: Array | None
    offset: int
    unroll: Callable[[Weights, Any, Array, Sight, int], Iterator[Array]]
    drafter: Callable[[Weights], Any]


def of_eagle(target: Any, draft_ids: np.ndarray | None, seed: int) -> Trainee:
    """An EAGLE head, but for the embedding and the output head, which are the target's."""
    head = eagle.new_head(target, draft_ids, seed)
    graph, own, rest = nnx.split(head, _is_trained, ...)

    def merged(weights: Weights) -> Any:
        state = jax.tree.map(lambda leaf: leaf, own)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(graph, state, rest)

    def unroll(weights: Weights, target: Any, tokens: Array, sight: Sight, depth: int) -> Iterator[Array]:
        return eagle.unroll(merged(weights), target, tokens, sight.states, depth)

    return Trainee(
        weights=nnx.to_pure_dict(own),
        features=head.config.features,
        draft_ids=None if draft_ids is None else jnp.asarray(draft_ids, jnp.int32),
        offset=1,
        unroll=unroll,
        drafter=lambda weights: EagleDrafter(merged(weights)),
    )


def _is_trained(path: tuple[Any, ...], leaf: Any) -> bool:
    return isinstance(leaf, nnx.Param) and path[0] not in ("lm_head", "embed_tokens")


KINDS: dict[str, Callable[[Any, np.ndarray | None, int], Trainee]] = {"eagle": of_eagle}
