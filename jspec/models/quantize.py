"""Quantisation, which stores every matrix as int8 with one float32 scale per column.

Decoding reads all weights at every pass, so their size in bytes determines its cost. A draft model can be rounded
freely, because the output distribution does not depend on the quality of the draft. On CPU, int8 saves memory between
calls but no time, because XLA widens the weights once per call, before the loop.
"""

from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jspec.models.array_layout import lay_out
from jspec.models.layers import Embed, Linear
from jspec.models.llama import Llama, matrices, set_weight
from jspec.models.packed import widen


def quantize(model: Llama, kind: str = "int8") -> Llama:
    """Return a copy of `model` with int8 matrices: ``W ~ W8 scale`` with ``scale[out] = max |W[:, out]| / 127``.

    Each weight changes by at most ``scale / 2``. The copy shares with `model` its norms, biases and any matrices that
    are already int8. Packed matrices are widened first. `jspec.load` quantises a checkpoint in the same way, one array
    at a time.

    Args:
        model: any Llama.
        kind: "int8".

    Raises:
        ValueError: `kind` is not "int8", or a weight is not finite.
    """
    check_kind(kind)

    def same(leaf: Array) -> Array:
        return leaf

    model = jax.tree.map(same, model)  # a copy of the tree
    for name, module in matrices(model).items():
        if module.scale is None:
            pack(module, module.weight[...] if module.packed is None else widen(module.packed).T, name)
    lay_out(model)
    return model


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` is supported."""
    if kind != "int8":
        raise ValueError(f'quantize={kind!r} is not supported; use "int8", or None to leave the weights as they are.')


def pack(module: Linear | Embed, weight: Array, name: str) -> None:
    """Store ``weight[in, out]`` in `module` as int8 with its scale.

    Raises:
        ValueError: the weight is not finite, so its column would become noise.
    """
    rounded, scale = cast(tuple[Array, Array], _int8(weight))
    if not jnp.isfinite(scale).all():
        raise ValueError(f"{name} has a value that is not finite, which int8 cannot hold; do not quantize this model.")
    set_weight(module, rounded)
    module.scale = nnx.data(nnx.Param(scale))


@jax.jit
def _int8(weight: Array) -> tuple[Array, Array]:
    """Return ``int8[in, out]`` and ``float32[out]`` for ``weight[in, out]``, computed in float32."""
    weight = weight.astype(jnp.float32)
    scale = jnp.abs(weight).max(axis=0) / 127
    # A column may hold zeros, or values so small that a device may flush them to zero. NaN is kept, so it is detected.
    scale = jnp.where(scale < cast(float, jnp.finfo(jnp.float32).tiny), 1, scale)
    return jnp.round(weight / scale).astype(jnp.int8), scale
