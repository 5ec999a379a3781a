"""Quantisation: which form "int8" and "int4" have on a device, and the form with one scale per column.

Decoding reads all weights at every pass, so their size in bytes determines its cost. A draft model can be rounded
freely, because the output distribution does not depend on the quality of the draft.

Where weights are packed (see `jspec.load`), both kinds quantise groups of 32 weights (`jspec.models.groups`), and
native kernels read them as they are stored. Elsewhere, "int8" stores one float32 scale per column. XLA can read such
weights in the product itself, but on CPU it widens them once per call, before the loop, so they save no time there.
"""

from typing import cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert.config import LlamaConfig
from convert.keymap import shapes
from jspec.models.array_layout import lay_out
from jspec.models.groups import GROUP, quantized_matrix, quantized_part
from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.product import ProductKernel
from jspec.models.layers import Embed, Linear, copy_tree
from jspec.models.llama import Llama, matrices, set_packed, set_weight
from jspec.models.packed import PackedMatrix, widen

_FORMATS = {"int8": "Q8_0", "int4": "Q4_1"}  # the formats of packed matrices, 8.5 and 5 bits per weight


def quantize(model: Llama, kind: str = "int8") -> Llama:
    """Return a copy of `model` with quantised matrices.

    The form depends on the model. If it is packed, or is on a CPU where `jspec.load` packs by default, every group of
    32 inputs of an output has a float16 scale: "int8" takes 8.5 bits per weight. "int4" also has a float16 minimum per
    group and takes 5 bits per weight. A pass reads only these bytes. Packed matrices that take no more bits already,
    such as those in Q4_K, stay as they are.

    Otherwise, and for sizes that are not multiples of 32, "int8" has a float32 scale per column: ``W ~ W8 scale`` with
    ``scale[out] = max |W[:, out]| / 127``, and "int4" is not available.

    Each weight changes by at most half a step of its scale, apart from the rounding of scales to float16. The copy
    shares with `model` its norms, biases and all matrices that stay as they are. `jspec.load` quantises a checkpoint
    in the same way, one array at a time.

    Args:
        model: any Llama.
        kind: "int8" or "int4".

    Raises:
        ValueError: `kind` is unknown, or is "int4" and the model cannot be packed; or a weight is not finite.
    """
    check_kind(kind)
    parts = [part for module in matrices(model).values() for part in module.packed or ()]
    bits = min((part.activation_bits for part in parts), default=24)
    format = packed_format(kind, model.config, None, bool(parts) or _can_be_packed(model), bits)
    model = copy_tree(model)
    for name, module in matrices(model).items():
        if module.scale is None or format == _FORMATS["int4"]:
            quantize_matrix(module, _source(module), format, bits, name)
    model.quantized = kind
    lay_out(model)
    return model


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` is supported."""
    if kind not in _FORMATS:
        raise ValueError(
            f'quantize={kind!r} is not supported; use "int8" or "int4", or None to leave the weights as they are.'
        )


def packed_format(kind: str, config: LlamaConfig, packed: bool | None, by_default: bool, bits: int) -> str | None:
    """Return the format of packed matrices for `kind`, or None for int8 with one scale per column.

    Args:
        packed: whether to pack the matrices; None to pack them if possible and `by_default`.
        bits: the size of rounded activations. See `jspec.models.packed`.

    Raises:
        ValueError: int4 matrices are not to be packed, or the matrices cannot be packed because of their sizes.
    """
    format = _FORMATS[kind]
    widths = ((name, shape[1]) for name, shape in shapes(config).items() if len(shape) == 2)
    unsuited = next(((name, width) for name, width in widths if width % GROUP), None)
    if packed is None and unsuited is not None and kind == "int8":
        return None
    if packed is None:
        packed = by_default and native.register(ProductKernel(format, bits))
    if not packed and kind == "int4":
        raise ValueError(
            'quantize="int4" needs packed weights, which are the default only for float32 on one CPU with AVX-512 VNNI '
            'and a C++ compiler; pass packed=True to jspec.load on another CPU, or use quantize="int8".'
        )
    if not packed:
        return None
    if unsuited is not None:
        raise ValueError(
            f"{unsuited[0]} has {unsuited[1]} inputs, but packed {kind} weights need a multiple of {GROUP}; use "
            'quantize="int8" without packed=True.'
        )
    return format


def quantize_matrix(
    module: Linear | Embed, source: Array | np.ndarray | list[PackedMatrix], format: str | None, bits: int, name: str
) -> None:
    """Store a matrix in `module` in `format`; None means int8 with its scale.

    Args:
        source: ``[in, out]``, or packed matrices that hold consecutive outputs.

    Raises:
        ValueError: a weight is not finite.
    """
    if format is None:
        pack(module, jnp.asarray(widen(source).T if isinstance(source, list) else source), name)
    elif isinstance(source, list):
        set_packed(module, [quantized_part(part, format, bits, name) for part in source])
    else:
        set_packed(module, [quantized_matrix(np.asarray(source).T, format, bits, name)])


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


def is_packed_by_default(dtype: jnp.dtype) -> bool:
    """Return whether `jspec.load` packs an unsharded model of this dtype by default."""
    return jax.default_backend() == "cpu" and dtype == jnp.float32 and native.is_default()


def _can_be_packed(model: Llama) -> bool:
    """Return whether `jspec.load` would pack a model like `model` by default."""
    leaves = jax.tree.leaves(model)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    devices = {device for leaf in leaves if isinstance(leaf, Array) for device in leaf.devices()}
    return len(devices) <= 1 and is_packed_by_default(model.dtype)


def _source(module: Linear | Embed) -> Array | list[PackedMatrix]:
    """Return the matrix of `module` for `quantize_matrix`."""
    if module.packed is not None:
        return list(module.packed)
    weight = module.weight[...]
    return weight if module.scale is None else weight.astype(jnp.float32) * module.scale[...]


@jax.jit
def _int8(weight: Array) -> tuple[Array, Array]:
    """Return ``int8[in, out]`` and ``float32[out]`` for ``weight[in, out]``, computed in float32."""
    weight = weight.astype(jnp.float32)
    scale = jnp.abs(weight).max(axis=0) / 127
    # A column may hold zeros, or values so small that a device may flush them to zero. NaN is kept, so it is detected.
    scale = jnp.where(scale < cast(float, jnp.finfo(jnp.float32).tiny), 1, scale)
    return jnp.round(weight / scale).astype(jnp.int8), scale
