"""EAGLE heads with random weights."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.drafters.heads.eagle_module import Eagle, EagleConfig


def eagle(target, generation=3, seed=3, layer=None, **details):
    """Return an EAGLE head for `target`, with weights far from 0 so that its drafts depend on its input."""
    config = EagleConfig(
        generation=generation,
        layer=layer or dataclasses.replace(target.config, num_hidden_layers=1),
        **{"target_hidden_size": target.config.hidden_size, "features": (-1,) if generation == 1 else (0, 1, 2)}
        | details,
    )
    head = nnx.eval_shape(lambda: Eagle(config, target.dtype, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(nnx.state(head)):
        if path[-1] == "draft_ids":
            leaf.set_value(jnp.minimum(jnp.arange(leaf.shape[0], dtype=jnp.int32), config.draft_vocab_size))
        elif len(leaf.shape) == 2:
            leaf.set_value(jnp.asarray(rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5, leaf.dtype))
        else:
            leaf.set_value(jnp.asarray(1 + 0.1 * rng.normal(size=leaf.shape), leaf.dtype))
    return head
