"""Block drafters with random weights."""

import dataclasses

from flax import nnx

from convert.heads.block.config import BlockConfig
from jspec.drafters.heads.block_drafter import BlockDrafter
from jspec.drafters.heads.block_module import Block
from support import heads


def block(target, features=(1, 2), num_layers=2, seed=4, qk_norm=False, **details):
    """Return a block for `target`, with weights far from 0 so that its drafts depend on its input."""
    sizes = target.config
    config = BlockConfig(
        body=dataclasses.replace(sizes, num_hidden_layers=num_layers, qk_norm=qk_norm or sizes.qk_norm),
        target_hidden_size=sizes.hidden_size,
        features=features,
        **{"block_size": 6, "mask_id": sizes.vocab_size - 1} | details,
    )
    return heads.spread_out(lambda: Block(config, target.dtype, rngs=nnx.Rngs(0)), config.draft_vocab_size, seed)


def drafter(target, **details):
    """Return a drafter with a random block for `target`."""
    return BlockDrafter(block(target, **details))
