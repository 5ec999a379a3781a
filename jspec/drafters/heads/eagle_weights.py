"""File I/O for EAGLE heads: `load` fills an `Eagle` with the arrays that `convert` reads, and `save` writes them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from convert import dtypes
from convert.errors import CheckpointError
from convert.heads.eagle import files as eagle_files
from jspec.drafters.heads.eagle_module import Eagle, check_target_of
from jspec.drafters.heads.module_arrays import arrays_of, check_unquantized, fill, no_output_head
from jspec.models.llama import Llama
from jspec.models.load import as_stored, default_dtype


def load(source: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Eagle:
    """Load a head. See `jspec.EagleDrafter.load`."""
    found = eagle_files.read(source, None if target is None else target.config.num_hidden_layers)
    chosen = dtypes.parse(default_dtype() if dtype is None else dtype)
    config = found.config
    if target is not None:
        check_target_of(config, target)
    lacking = config.draft_vocab_size is not None and not config.own_head
    if lacking and target is None:
        raise no_output_head(source, config.draft_vocab_size)
    made = dataclasses.replace(config, own_head=True) if lacking else config
    head = nnx.eval_shape(lambda: Eagle(made, jnp.dtype(chosen), rngs=nnx.Rngs(0)))
    fill(head, found.arrays(chosen), found.draft_ids)
    if lacking and target is not None and head.lm_head is not None:
        head.lm_head.weight.set_value(target.head.wide(head.target_ids).astype(chosen))
    # A dtype that was chosen here by default does not apply to saved files, which keep their own dtype.
    head.origin = found.origin if dtype is None else dataclasses.replace(found.origin, dtype=None)
    return head


def save(head: Eagle, destination: str | Path, layout: str, own_head: bool | None) -> Path:
    """Save a head. See `jspec.EagleDrafter.save`."""
    check_unquantized("EAGLE head", head.quantized)
    config, origin = head.config, head.origin
    if own_head is None and origin is not None and origin.layout == layout:
        own_head = config.own_head and "lm_head.weight" in origin.names
    if own_head and not config.own_head:
        raise CheckpointError("the EAGLE head has no output head of its own that could be saved; omit own_head.")
    written = dataclasses.replace(config, own_head=config.own_head if own_head is None else own_head)
    arrays, draft_ids = arrays_of(head)
    if not written.own_head:
        arrays.pop("lm_head.weight", None)
    arrays = as_stored(arrays, None if origin is None else origin.dtype)
    return eagle_files.write(destination, written, arrays, draft_ids, layout, origin)
