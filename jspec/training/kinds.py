# pyright: reportUnknownArgumentType=false
"""The kinds of drafters that can be trained, each with an initial drafter and its logits for whole sequences."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.generation_config import SamplingDefaults
from jspec.drafters import (
    BlockDrafter,
    BlockwiseDrafter,
    EagleDrafter,
    HydraDrafter,
    KangarooDrafter,
    MedusaDrafter,
    ModelDrafter,
    PassDrafter,
)
from jspec.drafters.base import DraftSource, kind_of, own_tree
from jspec.generation.generate import speculative_generate
from jspec.models.llama import Llama, set_placement, widened
from jspec.training import block_training, heads
from jspec.training import eagle_training as eagle
from jspec.training.objective import Judge, Score, score
from jspec.training.target_states import TargetStates

Weights = dict[str, Array]
_Unroll = Callable[[Any, Llama, Array, TargetStates, int], Iterator[Array]]
Trainable: TypeAlias = (
    BlockDrafter
    | EagleDrafter
    | MedusaDrafter
    | BlockwiseDrafter
    | HydraDrafter
    | PassDrafter
    | KangarooDrafter
    | ModelDrafter
)


# For each drafter class, the function that computes its logits ``[B, S', D]`` at each depth for whole sequences, and
# their offset: the logits at position t are for the token ``t + 1 + offset``.
UNROLLS: dict[type, tuple[_Unroll, int]] = {
    EagleDrafter: (
        lambda drafter, target, tokens, target_states, depth: eagle.unroll(
            drafter.head, target, tokens, target_states.states, depth
        ),
        1,
    ),
    MedusaDrafter: (heads.parallel, 1),
    BlockwiseDrafter: (heads.parallel, 1),
    HydraDrafter: (heads.hydra, 1),
    PassDrafter: (heads.look_ahead, 1),
    KangarooDrafter: (heads.kangaroo, 0),
    ModelDrafter: (heads.model, 0),
}


@dataclasses.dataclass(frozen=True)
class Trainee:
    """A drafter in training.

    Attributes:
        weights: the trained weights, in float32.
        fixed: all other weights, unchanged.
        features: the target's states that the drafter reads, in addition to the last layer's output.
        draft_ids: ``int32[D]``, the tokens that the drafter can draft; None for all.
        tables: the names of the weights with a row for each token. Muon would change the rows of rare tokens too much.
        score: a function of all weights (including fixed ones), the target, ``tokens[B, S]``, the `TargetStates`, the
            `Judge`, the number of depths and the name of a loss. It returns the `Score`.
        drafter: a function that maps such weights to the drafter that decodes with them.
        repeats: whether each further depth applies the same weights again, which takes more computation.
    """

    weights: Weights
    fixed: Weights
    features: tuple[int, ...]
    draft_ids: Array | None
    tables: frozenset[str]
    score: Callable[[Weights, Llama, Array, TargetStates, Judge, int, str], Score]
    drafter: Callable[[Weights], Trainable]
    repeats: bool


def trainee_of(drafter: object) -> Trainee:
    """Return a `Trainee` for `drafter`. The embedding and output head of an EAGLE head or a block drafter stay fixed.

    Raises:
        TypeError: `drafter` is of a kind that cannot be trained.
    """
    if type(drafter) not in (BlockDrafter, *UNROLLS):
        known = ", ".join(sorted(kind.__name__ for kind in (BlockDrafter, *UNROLLS)))
        raise TypeError(f"{type(drafter).__name__} cannot be trained; expected one of {known}.")
    leaves, form = cast(tuple[list[tuple[object, Array]], Any], jax.tree_util.tree_flatten_with_path(drafter))
    fixed = ("lm_head", "embed_tokens") if isinstance(drafter, BlockDrafter | EagleDrafter) else ()
    named = {f"{i:03}": leaf for i, (_, leaf) in enumerate(leaves)}
    trained = {
        name
        for (path, leaf), name in zip(leaves, named, strict=True)
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not any(part in str(path) for part in fixed)
    }

    tables = {name for (path, _), name in zip(leaves, named, strict=True) if "markov_w" in str(path)}

    def made(weights: Weights) -> Trainable:
        return form.unflatten([weights.get(name, leaf) for name, leaf in named.items()])

    return Trainee(
        weights={name: jnp.asarray(leaf, jnp.float32) for name, leaf in named.items() if name in trained},
        fixed={name: leaf for name, leaf in named.items() if name not in trained},
        features=drafter.features if isinstance(drafter, BlockDrafter | EagleDrafter | KangarooDrafter) else (),
        draft_ids=_draft_ids(drafter),
        tables=frozenset(tables),
        score=lambda weights, *batch: _score(made(weights), *batch),
        drafter=made,
        repeats=isinstance(drafter, EagleDrafter),
    )


def _score(
    drafter: Any, target: Llama, tokens: Array, target_states: TargetStates, judge: Judge, depth: int, loss: str
) -> Score:
    """Return the score of `drafter` on a batch. See `Trainee`."""
    if isinstance(drafter, BlockDrafter):
        return block_training.score(drafter.block, target, tokens, target_states, judge, depth, loss)
    unroll, offset = UNROLLS[type(drafter)]
    return score(unroll(drafter, target, tokens, target_states, depth), offset, judge, loss)


def _draft_ids(drafter: object) -> Array | None:
    """Return ``int32[D]``, the tokens that `drafter` can draft; None for all."""
    match drafter:
        case EagleDrafter():
            return drafter.head.target_ids
        case BlockDrafter():
            return drafter.block.target_ids
        case _:
            return None


def unpacked(drafter: Trainable) -> Trainable:
    """Return `drafter` with its model's packed matrices widened, because only arrays of floats can be trained."""
    return dataclasses.replace(drafter, model=widened(drafter.model)) if isinstance(drafter, ModelDrafter) else drafter


def check_fits(drafter: Trainable, target: Llama, depth: int) -> None:
    """Raise TypeError or ValueError unless `drafter` can learn to draft `depth` tokens in a row for `target`.

    Errors that decoding would raise because of incompatible sizes are raised here, before anything is computed.
    """
    if isinstance(drafter, PassDrafter) and len(drafter.embeddings) < depth:
        raise ValueError(
            f"PassDrafter has {len(drafter.embeddings)} vectors, but depth is {depth}; use at least as many vectors."
        )
    if isinstance(drafter, ModelDrafter) and drafter.draft_ids is not None:
        raise ValueError(
            "The drafter has a reduced vocabulary and cannot be trained; train the original model, and reduce its "
            "vocabulary afterwards."
        )
    if isinstance(drafter, ModelDrafter) and drafter.model.quantized is not None:
        raise _quantized(drafter.model.quantized)
    if isinstance(drafter, EagleDrafter) and drafter.head.quantized is not None:
        raise _quantized(drafter.head.quantized)
    if isinstance(drafter, BlockDrafter):
        _check_block(drafter)
    length = {} if own_tree(drafter) else {"num_draft_tokens": depth}
    decode = functools.partial(speculative_generate, max_new_tokens=1, **length)
    prompt, keys = (
        jax.ShapeDtypeStruct((1, 2), jnp.int32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1)),
    )
    jax.eval_shape(decode, target, drafter, prompt, jax.ShapeDtypeStruct((1,), jnp.int32), keys)


def _check_block(drafter: BlockDrafter) -> None:
    """Raise ValueError unless training supports every part of a block drafter."""
    config, quantized = drafter.block.config, drafter.block.quantized
    if quantized is not None:
        raise _quantized(quantized)
    lacking = {"DFlash2's convolutions and selector": config.dflash2, "layers with windows": config.windows}
    for name, part in lacking.items():
        if part:
            raise ValueError(f"The block drafter has {name}, which cannot be trained; use a drafter without them.")


def _quantized(kind: str) -> ValueError:
    return ValueError(f"The drafter is {kind} and cannot be trained; load it without quantising.")


def of_eagle(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> EagleDrafter:
    """Return an untrained EAGLE head with the target's embedding and output head."""
    return EagleDrafter(eagle.new_head(target, draft_ids, seed))


def of_block(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> BlockDrafter:
    """Return an untrained block drafter with the target's embedding and output head."""
    return BlockDrafter(block_training.new_block(target, draft_ids, depth, seed))


def of_medusa(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> MedusaDrafter:
    """Return heads that are initialised to the target's own head (Cai et al. 2024, section 2.2.1)."""
    drafter = MedusaDrafter.untrained(target, depth, rngs=nnx.Rngs(seed))
    for head in drafter.heads:
        head.lm_head.weight.set_value(target.head.wide())
        linear = head.blocks[0].linear
        linear.weight.set_value(jnp.zeros_like(linear.weight[...]))
    return drafter


def of_blockwise(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> BlockwiseDrafter:
    """Return an untrained layer in front of the target's own head."""
    return BlockwiseDrafter.untrained(target, depth, rngs=nnx.Rngs(seed))


def of_hydra(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> HydraDrafter:
    """Return untrained heads, each with its own first layer and the target's output head."""
    return HydraDrafter.untrained(target, depth, own_head=False, rngs=nnx.Rngs(seed))


def of_kangaroo(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> KangarooDrafter:
    """Return an adapter after the first tenth of the target's layers (at least one), with the target's final norm."""
    drafter = KangarooDrafter.untrained(target, max(1, len(target.layers) // 10), rngs=nnx.Rngs(seed))
    drafter.adapter.norm.weight.set_value(jnp.asarray(target.norm.weight[...], drafter.adapter.dtype))
    return drafter


def of_pass(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> PassDrafter:
    """Return look-ahead vectors that are initialised to slightly different values."""
    return PassDrafter.untrained(target, depth, rngs=nnx.Rngs(seed))


def check_start(start: DraftSource, kind: str, target: Llama, depth: int, length: int, boost: int) -> None:
    """Raise an error unless training of `kind` can continue from `start` on sequences of `length` tokens."""
    if boost > 1:
        raise ValueError(f"boost is {boost}, but only one drafter can be trained from start; omit boost or start.")
    if not isinstance(start, _CLASSES[kind]):
        known = [f"kind={name!r}" for name, made in _CLASSES.items() if isinstance(start, made)]
        raise ValueError(
            f"start is of type {kind_of(start)}, but kind is {kind!r}; use "
            f"{known[0] if known else f'one of type {_CLASSES[kind].__name__}'}."
        )
    if start.max_positions is not None and start.max_positions < length:
        raise ValueError(f"start has {start.max_positions} positions, but length is {length}; reduce length.")
    check_fits(start, target, depth)


def check_kind(kind: str, target: Llama) -> None:
    """Raise ValueError unless `kind` can be trained for `target`."""
    if kind == "model" and target.quantized is not None:
        raise ValueError(
            f"A draft model starts from layers of the target, but the target's layers are {target.quantized}; load it "
            "without quantising."
        )


def of_model(target: Llama, draft_ids: np.ndarray | None, depth: int, seed: int) -> ModelDrafter:
    """Return a model of every sixth target layer, initialised with the target's weights."""
    check_kind("model", target)
    target = widened(target)
    layers = range(0, len(target.layers), 6)
    config = dataclasses.replace(target.config, num_hidden_layers=len(layers), sampling=SamplingDefaults())
    made = Llama(config, jnp.float32, rngs=nnx.Rngs(seed))
    if target.placement is not None:
        set_placement(made, target.placement)
    parts = [(made.embed_tokens, target.embed_tokens), (made.norm, target.norm), (made.lm_head, target.lm_head)]
    parts += [(made.layers[i], target.layers[layer]) for i, layer in enumerate(layers)]
    for own, source in parts:
        if own is not None:
            nnx.update(own, jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), nnx.state(source)))
    return ModelDrafter(made)


_CLASSES: dict[str, type[Trainable]] = {
    "eagle": EagleDrafter,
    "block": BlockDrafter,
    "medusa": MedusaDrafter,
    "hydra": HydraDrafter,
    "blockwise": BlockwiseDrafter,
    "kangaroo": KangarooDrafter,
    "pass": PassDrafter,
    "model": ModelDrafter,
}

# Functions that make an untrained drafter from a target, the draftable tokens (None for all), a depth and a seed.
KINDS: dict[str, Callable[[Llama, np.ndarray | None, int, int], Trainable]] = {
    "eagle": of_eagle,
    "block": of_block,
    "medusa": of_medusa,
    "hydra": of_hydra,
    "blockwise": of_blockwise,
    "kangaroo": of_kangaroo,
    "pass": of_pass,
    "model": of_model,
}
