# pyright: reportUnknownVariableType=false
"""File I/O for block drafters: `load` fills a `Block` with the arrays that `convert` reads, and `save` writes them."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from convert import dtypes
from convert.heads.block import files as block_files
from jspec.drafters.heads.block_module import Block, check_target_of
from jspec.models.llama import Llama
from jspec.models.load import as_stored, default_dtype


def load(source: str | Path, target: Llama | None = None, dtype: DTypeLike | None = None) -> Block:
    """Load a block. See `jspec.BlockDrafter.load`."""
    found = block_files.read(source, None if target is None else target.config.num_hidden_layers)
    chosen = dtypes.parse(default_dtype() if dtype is None else dtype)
    if target is not None:
        check_target_of(found.config, target)
    block = nnx.eval_shape(lambda: Block(found.config, jnp.dtype(chosen), rngs=nnx.Rngs(0)))
    leaves: dict[str, nnx.Variable[Array]] = {
        ".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(block))
    }
    for name, array in found.arrays(chosen):
        leaves[name].set_value(jnp.asarray(array).T)
    if found.draft_ids is not None:
        leaves["draft_ids"].set_value(jnp.asarray(found.draft_ids))
    # A dtype that was chosen here by default does not apply to saved files, which keep their own dtype.
    block.origin = found.origin if dtype is None else dataclasses.replace(found.origin, dtype=None)
    return block


def save(block: Block, destination: str | Path, format: str) -> Path:
    """Save a block. See `jspec.BlockDrafter.save`."""
    state: dict[str, Array] = {
        ".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(block))
    }
    draft_ids = state.pop("draft_ids", None)
    arrays = {name: np.ascontiguousarray(np.asarray(value).T) for name, value in state.items()}
    arrays = as_stored(arrays, None if block.origin is None else block.origin.dtype)
    ids = None if draft_ids is None else np.asarray(draft_ids)
    return block_files.write(destination, block.config, arrays, ids, format, block.origin)
