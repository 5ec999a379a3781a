"""Helpers for the embedding tests and others."""

import jax
import jax.numpy as jnp
from flax import nnx

from support import toys

TARGET = toys.tiny_llama(0, 2)


def longer_vocabulary(vectors):
    """Return the target with the vectors as additional tokens."""
    graph, state = nnx.split(TARGET)
    model = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    model.embed_tokens.weight = nnx.Param(jnp.concatenate([model.embed_tokens.weight[...], vectors.T], axis=1))
    return model
