"""File I/O for block drafters: `load` fills a `Block` with the arrays that `convert` reads, and `save` writes them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from convert import dtypes
from convert.heads.block import files as block_files
from convert.heads.block.config import check_target_of
from jspec.drafters.heads.block_module import Block
from jspec.drafters.heads.module_arrays import arrays_of, check_unquantized, fill, no_output_head
from jspec.models.llama import Llama
from jspec.models.load import as_stored, default_dtype


def load(source: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Block:
    """Load a block. See `jspec.BlockDrafter.load`."""
    found = block_files.read(source, None if target is None else target.config.num_hidden_layers)
    chosen, config = dtypes.parse(default_dtype() if dtype is None else dtype), found.config
    if target is not None:
        check_target_of(config, target.config)
    lacking = config.draft_vocab_size is not None and not config.own_head
    if lacking and target is None:
        raise no_output_head(source, config.draft_vocab_size)
    made = dataclasses.replace(config, own_head=True) if lacking else config
    block = nnx.eval_shape(lambda: Block(made, jnp.dtype(chosen), rngs=nnx.Rngs(0)))
    fill(block, found.arrays(chosen), found.draft_ids)
    if lacking and target is not None and block.lm_head is not None:
        block.lm_head.weight.set_value(target.head.wide(block.target_ids).astype(chosen))
    # A dtype that was chosen here by default does not apply to saved files, which keep their own dtype.
    block.origin = found.origin if dtype is None else dataclasses.replace(found.origin, dtype=None)
    return block


def save(block: Block, destination: str | Path, format: str, own_head: bool) -> Path:
    """Save a block. See `jspec.BlockDrafter.save`."""
    check_unquantized("block drafter", block.quantized)
    written = dataclasses.replace(block.config, own_head=own_head and block.config.own_head)
    arrays, draft_ids = arrays_of(block)
    if not written.own_head:
        arrays.pop("lm_head.weight", None)
    arrays = as_stored(arrays, None if block.origin is None else block.origin.dtype)
    return block_files.write(destination, written, arrays, draft_ids, format, block.origin)
