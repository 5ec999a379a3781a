"""The quantiser: every matrix as int8, each of its columns with a float32 scale of its own.

Decoding reads all weights at every pass, so their bytes are its price; a draft may be rounded freely, for the target's
law does not depend on how good the draft is. On CPU that saves memory between calls and no time: there XLA widens the
weights once a call, before the loop.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jspec.models.array_layout import lay_out
from jspec.models.layers import Embed, Linear
from jspec.models.llama import Llama


def quantize(model: Llama, kind: str = "int8") -> Llama:
    """A copy of `model` with int8 matrices, ``W ~ W8 scale`` with ``scale[out] = max |W[:, out]| / 127``.

    So a weight moves by ``scale / 2`` at most. Norms and biases are shared with `model`, and so are matrices that are
    int8 already. `jspec.load` does the same to a checkpoint, one array after another.

    Args:
        model: any Llama.
        kind: "int8".

    Raises:
        ValueError: another kind, or a weight that is not finite.
    """
    check_kind(kind)
    model = jax.tree.map(lambda leaf: leaf, model)
    for name, module in matrices(model).items():
        if module.scale is None:
            pack(module, module.weight[...], name)
    lay_out(model)
    return model


def check_kind(kind: str) -> None:
    """Raises ValueError for what is not built."""
    if kind != "int8":
        raise ValueError(f'quantize={kind!r} is not supported; use "int8", or None to leave the weights as they are.')


def matrices(model: Llama) -> dict[str, Linear | Embed]:
    """The name of each matrix, and the module that holds it."""
    modules = ((path, module) for path, module in nnx.iter_modules(model) if isinstance(module, Linear | Embed))
    return {".".join(map(str, (*path, "weight"))): module for path, module in modules}


def pack(module: Linear | Embed, weight: Array, name: str) -> None:
    """Put ``weight[in, out]`` into `module` as int8 and scale.

    Raises:
        ValueError: it is not finite; its column would become noise.
    """
    rounded, scale = _int8(weight)
    if not jnp.isfinite(scale).all():
        raise ValueError(f"{name} has a value that is not finite, which int8 cannot hold; do not quantize this model.")
    module.weight.set_value(rounded)
    module.scale = nnx.data(nnx.Param(scale))


@jax.jit
def _int8(weight: Array) -> tuple[Array, Array]:
    """``int8[in, out]`` and ``float32[out]`` from ``weight[in, out]``, in float32."""
    weight = weight.astype(jnp.float32)
    scale = jnp.abs(weight).max(axis=0) / 127
    # A column of zeros, or of numbers so small that a device may take them for zeros; NaN stays, to be found.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1, scale)
    return jnp.round(weight / scale).astype(jnp.int8), scale
