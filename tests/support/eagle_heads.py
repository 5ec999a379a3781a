"""EAGLE heads with random weights."""

import dataclasses

from flax import nnx

from jspec.drafters.heads.eagle_module import Eagle, EagleConfig
from support import heads


def eagle(target, generation=3, seed=3, layer=None, **details):
    """Return an EAGLE head for `target`, with weights far from 0 so that its drafts depend on its input."""
    config = EagleConfig(
        generation=generation,
        layer=layer or dataclasses.replace(target.config, num_hidden_layers=1),
        **{"target_hidden_size": target.config.hidden_size, "features": (-1,) if generation == 1 else (0, 1, 2)}
        | details,
    )
    return heads.spread_out(lambda: Eagle(config, target.dtype, rngs=nnx.Rngs(0)), config.draft_vocab_size, seed)
