"""Block drafters with random weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.heads.block.config import BlockConfig
from jspec.drafters.heads.block_drafter import BlockDrafter
from jspec.drafters.heads.block_module import Block


def block(target, features=(1, 2), num_layers=2, seed=4, **details):
    """Return a block for `target`, with weights far from 0 so that its drafts depend on its input."""
    sizes = target.config
    config = BlockConfig(
        body=dataclasses.replace(sizes, num_hidden_layers=num_layers),
        target_hidden_size=sizes.hidden_size,
        features=features,
        **{"block_size": 6, "mask_id": sizes.vocab_size - 1} | details,
    )
    module = nnx.eval_shape(lambda: Block(config, target.dtype, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(nnx.state(module)):
        if path[-1] == "draft_ids":
            leaf.set_value(jnp.minimum(jnp.arange(leaf.shape[0], dtype=jnp.int32), config.draft_vocab_size))
        elif len(leaf.shape) == 2:
            leaf.set_value(jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5, leaf.dtype))
        else:
            leaf.set_value(jnp.asarray(1 + 0.1 * rng.normal(size=leaf.shape), leaf.dtype))
    return module


def drafter(target, **details):
    """Return a drafter with a random block for `target`."""
    return BlockDrafter(block(target, **details))
