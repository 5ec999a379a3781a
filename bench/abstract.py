"""Programs for models that consist of shapes only, lowered and compiled for devices that are not present."""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jspec
from bench import pairs
from convert.config import LlamaConfig
from convert.heads.block.config import BlockConfig
from jspec.core.sharding import TensorParallel
from jspec.decoding.inputs import ProgramSpec, PromptBatch
from jspec.decoding.program import decode_program, traced
from jspec.drafters.duck_length import as_draft_length
from jspec.drafters.heads.block_module import Block
from jspec.drafters.standalone.model import as_drafter
from jspec.models.array_layout import BY_TOKEN
from jspec.models.layers import copy_tree
from jspec.models.llama import matrices, set_parts, set_placement
from jspec.models.quantized_matrix import QuantizedMatrix, group_size
from jspec.rules import RULES, Rule


@dataclasses.dataclass(frozen=True)
class Setting:
    """The parameters that determine a program's shapes.

    Attributes:
        batch: the number of rows.
        width: the width of the prompts, in tokens.
        new_tokens: the maximum number of new tokens.
        draft_length: K, a `jspec.drafters.draft_length.DraftLength`, or 0 for plain decoding.
        rule: the acceptance rule, as an object.
    """

    batch: int = 1
    width: int = 128
    new_tokens: int = 384
    draft_length: Any = 4
    rule: Rule = RULES["rejection"]
    sampling: jspec.SamplingParams = jspec.SamplingParams()

    def plain(self) -> "Setting":
        """Return the same setting without a draft."""
        return dataclasses.replace(self, draft_length=0)


def model(config: LlamaConfig, dtype: Any, quantized: str | None = None) -> jspec.Llama:
    """Return a Llama that consists of shapes only, quantised as on a GPU or TPU if `quantized` is "int8" or "int4"."""

    def make() -> jspec.Llama:
        made = jspec.Llama(config, jnp.dtype(dtype), rngs=nnx.Rngs(0))
        made.quantized = quantized
        if quantized is None:
            return made
        for module in matrices(made).values():
            inputs, outputs = module.weight.shape
            size = group_size(inputs, quantized)
            shape = inputs // size, outputs, size
            set_parts(module, [QuantizedMatrix(jnp.zeros(shape, quantized), jnp.zeros(shape[:2], jnp.float32))])
        return made

    return nnx.eval_shape(make)


def configs(pair: str) -> tuple[LlamaConfig, LlamaConfig]:
    """Return the target's and draft's configs for a pair name, as in `bench.pairs.pair`, except "bundled".

    Raises:
        ValueError: the pair is unknown.
    """
    first, _, second = pairs.without_kinds(pair).partition("/")
    if first in pairs.STRETCHED and not second:
        found = pairs.STRETCHED[first]
        return found.config, dataclasses.replace(found.config, num_hidden_layers=found.draft_layers)
    if first in pairs.SHAPES and second in pairs.SHAPES:
        return pairs.SHAPES[first], pairs.SHAPES[second]
    raise ValueError(
        f"There is no pair {pair!r} of shapes; choose from {', '.join(pairs.STRETCHED)}, or write TARGET/DRAFT "
        f"with two of {', '.join(pairs.SHAPES)}, and append :int8 or :int4 to a shape to quantise that model; "
        f"DRAFT may also be {pairs.DSPARK}."
    )


def pair(name: str, dtype: Any, **changes: Any) -> tuple[jspec.Llama, jspec.Llama | jspec.BlockDrafter]:
    """Return the shapes of ``(target, draft)`` for a name that `configs` accepts, or for "TARGET/dspark".

    `changes` apply to both configs.
    """
    target_kind, draft_kind = pairs.quantization_kinds(name)
    first, _, second = name.partition("/")
    if second == pairs.DSPARK:
        target = dataclasses.replace(pairs.SHAPES[pairs.without_kinds(first)], **changes)
        drafter = block_drafter(pairs.dspark(target, changes.get("num_hidden_layers", 5)), dtype)
        return model(target, dtype, target_kind), drafter
    target, draft = (dataclasses.replace(config, **changes) for config in configs(name))
    return model(target, dtype, target_kind), model(draft, dtype, draft_kind)


def block_drafter(config: BlockConfig, dtype: Any) -> jspec.BlockDrafter:
    """Return a block drafter that consists of shapes only."""
    return jspec.BlockDrafter(nnx.eval_shape(lambda: Block(config, jnp.dtype(dtype), rngs=nnx.Rngs(0))))


def trace(target: Any, draft: Any, setting: Setting, found: np.ndarray | None = None) -> Any:
    """Trace the shipped program; ``.lower(lowering_platforms=...)`` gives StableHLO for any platform.

    Args:
        target, draft: models of shapes or of numbers. `draft` may also be a drafter or None.
        found: devices, from `bench.devices.topology`; None means JAX's own. Several devices share the matrices.
    """
    batch, length = setting.batch, as_draft_length(setting.draft_length)
    prompts = jax.eval_shape(
        lambda: PromptBatch(
            jnp.zeros((batch, setting.width), jnp.int32),
            jnp.zeros(batch, jnp.int32),
            jax.random.split(jax.random.key(0), batch),
        )
    )
    if found is not None and len(found) > 1:
        placement = jspec.tensor_parallel(Mesh(found, ("model",)))
        target, draft = (sharded(model, placement) for model in (target, draft))
    drafter = as_drafter(draft) if length.max_draft_tokens else None
    if found is not None:
        mesh = Mesh(found, ("model",))
        target, drafter, prompts = divided(target, mesh), divided(drafter, mesh), divided(prompts, mesh)
    with contextlib.nullcontext() if found is None else tracing_for(found):
        spec = ProgramSpec(setting.new_tokens, length, setting.rule)
        return decode_program.trace(target, drafter, prompts, traced(setting.sampling, (2,), 0), spec=spec)


def sharded(model: Any, placement: TensorParallel) -> Any:
    """Return a copy of `model` whose fused projections are stored as `placement` requires. Only models have them."""
    if not isinstance(model, jspec.Llama):
        return model
    model = copy_tree(model)
    set_placement(model, placement)
    return model


def tracing_for(found: np.ndarray) -> contextlib.AbstractContextManager[None]:
    """Return a context in which programs are traced for devices that need not be present.

    Since JAX 0.12, Pallas must know the GPU when a program is traced.
    """
    return jax.sharding.use_abstract_mesh(Mesh(found, ("model",)).abstract_mesh)


def divided(tree: Any, mesh: Mesh) -> Any:
    """Place `tree` on a mesh: shard its models' matrices by `jspec.tensor_parallel`, and replicate everything else."""
    place, whole = jspec.tensor_parallel(mesh, "model"), NamedSharding(mesh, PartitionSpec())

    def put(path: Any, leaf: Any) -> Any:
        name = ".".join(str(getattr(key, "key", getattr(key, "name", key))) for key in path).removesuffix(".value")
        is_matrix = any(part in name for part in ("proj", "embed_tokens", "lm_head"))
        where = place(name, leaf.shape) if mesh.size > 1 and is_matrix else whole
        if name.endswith("embed_tokens.weight") and mesh.devices.flat[0].platform == "tpu":
            where = Format(BY_TOKEN, where)  # as `jspec.load` does
        return _at(leaf, where)

    return jax.tree_util.tree_map_with_path(put, tree)


def _at(leaf: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
