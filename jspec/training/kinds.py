"""What can be trained: for each kind of drafter its weights as they begin, and what it says of whole texts."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jspec.drafters import (
    BlockwiseDrafter,
    EagleDrafter,
    HydraDrafter,
    KangarooDrafter,
    MedusaDrafter,
    ModelDrafter,
    PassDrafter,
)
from jspec.llama import Llama
from jspec.training import eagle, heads
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


def of_eagle(target: Any, draft_ids: np.ndarray | None, depth: int, seed: int) -> Trainee:
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


def of_medusa(target: Any, draft_ids: np.ndarray | None, depth: int, seed: int) -> Trainee:
    """Heads that begin as the target's own (Cai et al. 2024, section 2.2.1)."""
    drafter = MedusaDrafter.untrained(target, depth, rngs=nnx.Rngs(seed))
    for head in drafter.heads:
        head.lm_head.weight.set_value(_wide(target.head))
        linear = head.blocks[0].linear
        linear.weight.set_value(jnp.zeros_like(linear.weight[...]))
    return _whole(drafter, heads.parallel)


def of_blockwise(target: Any, draft_ids: np.ndarray | None, depth: int, seed: int) -> Trainee:
    """A layer in front of the target's own head."""
    return _whole(BlockwiseDrafter.untrained(target, depth, rngs=nnx.Rngs(seed)), heads.parallel)


def of_hydra(target: Any, draft_ids: np.ndarray | None, depth: int, seed: int) -> Trainee:
    """Heads of which each has a first layer of its own, and the target's output head."""
    return _whole(HydraDrafter.untrained(target, depth, own_head=False, rngs=nnx.Rngs(seed)), heads.hydra)


def of_kangaroo(target: Any, draft_ids: np.ndarray | None, depth: int, seed: int) -> Trainee:
    """An adapter behind the first tenth of the target's layers, and at least one."""
    drafter = KangarooDrafter.untrained(target, max(1, len(target.layers) // 10), rngs=nnx.Rngs(seed))
    return _whole(drafter, heads.kangaroo, offset=0, features=drafter.features)


def of_pass(target: Any, draft_ids: np.ndarray | None, depth: int, seed: int) -> Trainee:
    """Vectors that begin as the mean of all embeddings, and a little apart."""
    weight = _wide(target.embed_tokens)
    noise = 0.1 * weight.std() * jax.random.normal(jax.random.key(seed), (depth, len(weight)))
    return _whole(PassDrafter(weight.mean(axis=1) + noise), heads.look_ahead)


def of_model(target: Any, draft_ids: np.ndarray | None, depth: int, seed: int) -> Trainee:
    """A model of every sixth layer of the target, which begin as they are there."""
    if target.embed_tokens.scale is not None:
        raise ValueError("A draft model begins with layers of the target, and the target's are int8; load it without "
                         "quantising.")  # fmt: skip
    layers = range(0, len(target.layers), 6)
    config = dataclasses.replace(target.config, num_hidden_layers=len(layers))
    made = Llama(config, jnp.float32, rngs=nnx.Rngs(seed))
    parts = [(made.embed_tokens, target.embed_tokens), (made.norm, target.norm), (made.lm_head, target.lm_head)]
    parts += [(made.layers[i], target.layers[layer]) for i, layer in enumerate(layers)]
    for own, source in parts:
        if own is not None:
            nnx.update(own, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), nnx.state(source)))
    return _whole(ModelDrafter(made), heads.model, offset=0)


def _whole(
    drafter: Any, unroll: Callable[..., Iterator[Array]], offset: int = 1, features: tuple[int, ...] = ()
) -> Trainee:
    """A drafter of which every number is trained, and which can guess every token."""
    leaves, kind = jax.tree.flatten(drafter)
    names = [f"{i:03}" for i in range(len(leaves))]

    def made(weights: Weights) -> Any:
        return kind.unflatten([weights[name] for name in names])

    return Trainee(
        weights={name: jnp.asarray(leaf, jnp.float32) for name, leaf in zip(names, leaves, strict=True)},
        features=features,
        draft_ids=None,
        offset=offset,
        unroll=lambda weights, *rest: unroll(made(weights), *rest),
        drafter=made,
    )


def _is_trained(path: tuple[Any, ...], leaf: Any) -> bool:
    return isinstance(leaf, nnx.Param) and path[0] not in ("lm_head", "embed_tokens")


def _wide(embed: Any) -> Array:
    """``float32[E, V]`` of an embedding or output head, be it int8."""
    weight = embed.weight[...].astype(jnp.float32)
    return weight if embed.scale is None else weight * embed.scale[...]


KINDS: dict[str, Callable[[Any, np.ndarray | None, int, int], Trainee]] = {
    "eagle": of_eagle,
    "medusa": of_medusa,
    "hydra": of_hydra,
    "blockwise": of_blockwise,
    "kangaroo": of_kangaroo,
    "pass": of_pass,
    "model": of_model,
}
