# pyright: reportUnnecessaryIsInstance=false
"""Quantisation of weights to int8 or int4, in the form that suits a device.

Decoding reads all weights at every pass, so their size in bytes determines its cost. A draft model can be rounded
freely, because the output distribution does not depend on the quality of the draft.

Where weights are packed (see `jspec.load`), both kinds quantise groups of 32 weights (`jspec.models.groups`), and
native kernels read them as they are stored. Elsewhere, both kinds are stored as a `QuantizedMatrix`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

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
from jspec.models.layers import Embed, Linear, Module, copy_tree
from jspec.models.llama import Llama, all_parts, matrices, set_parts
from jspec.models.matrix_parts import MatrixPart, widen
from jspec.models.packed import FLOAT_FORMATS, PackedMatrix
from jspec.models.quantized_matrix import QuantizedMatrix, group_size

_FORMATS = {"int8": "Q8_0", "int4": "Q4_1"}  # the formats of packed matrices, 8.5 and 5 bits per weight


def quantize(model: Llama, kind: str = "int8") -> Llama:
    """Return a copy of `model` with quantised matrices.

    The form depends on the model. If it is packed, or is on a CPU where `jspec.load` packs by default, every group of
    32 inputs of an output has a float16 scale: "int8" takes 8.5 bits per weight. "int4" also has a float16 minimum per
    group and takes 5 bits per weight. A pass reads only these bytes. Packed matrices that take no more bits already,
    such as those in Q4_K, stay as they are.

    Otherwise, and for int8 if a number of inputs is not a multiple of 32, "int8" has a float32 scale per output:
    ``W ~ scale W8`` with ``scale[o] = max |W[:, o]| / 127``. "int4" has a float32 scale per output and group of inputs:
    ``scale = w / -8``, where w is the group's weight of largest absolute value, as in ggml's Q4_0. Groups have 128
    inputs, or 64 or 32 if 128 does not divide the number of inputs. "int4" then takes 4.25 to 5 bits per weight. On
    GPUs and TPUs, a pass over a few rows reads only these bytes.

    Each weight changes by at most half a step of its scale, apart from the rounding of scales to float16. The exception
    is int4 without minimums: its largest code is 7, so weights between 7.5 and 8 steps change by up to one step. The
    copy shares with `model` its norms, biases and all matrices that stay as they are. `jspec.load` quantises a
    checkpoint in the same way, one array at a time.

    Args:
        model: any Llama.
        kind: "int8" or "int4".

    Raises:
        TypeError: `model` is not a Llama.
        ValueError: `kind` is unknown, or is "int4" and the number of inputs of a matrix is not a multiple of 32, or a
            group would span two devices; or a weight is not finite.
    """
    if not isinstance(model, Llama):
        raise TypeError(f"model is of type {type(model).__name__}, which cannot be quantised; pass a jspec.Llama.")
    model = quantized_copy(model, kind, model.dtype)
    formats = {part.format for part in all_parts(model)}
    model.quantized = "int4" if formats <= {"int4", _FORMATS["int4"]} else kind
    lay_out(model)
    return model


def quantized_copy(module: Module, kind: str, dtype: jnp.dtype, activation_bits: int = 24) -> Module:
    """Return a copy of a module whose matrices are quantised. See `quantize`.

    Args:
        dtype: the dtype of activations.
        activation_bits: the number of bits of rounded activations, unless packed matrices in `module` use fewer.

    Raises:
        ValueError: under the same conditions as `quantize`.
    """
    check_kind(kind)
    packed = [part for part in all_parts(module) if isinstance(part, PackedMatrix)]
    bits = min((activation_bits, *(part.activation_bits for part in packed)))
    widths = {name: _width(matrix) for name, matrix in matrices(module).items()}
    format = packed_format(kind, widths, None, bool(packed) or _can_be_packed(module, dtype), bits)
    module = copy_tree(module)
    for name, matrix in matrices(module).items():
        quantize_matrix(matrix, _source(matrix), kind, format, bits, name)
    return module


def check_kind(kind: str) -> None:
    """Raise ValueError unless `kind` is supported."""
    if kind not in _FORMATS:
        raise ValueError(
            f'quantize={kind!r} is not supported; use "int8" or "int4", or None to leave the weights as they are.'
        )


def widths_of(config: LlamaConfig) -> dict[str, int]:
    """Return the number of inputs of each matrix of a model."""
    return {name: shape[1] for name, shape in shapes(config).items() if len(shape) == 2}


def packed_format(kind: str, widths: Mapping[str, int], packed: bool | None, by_default: bool, bits: int) -> str | None:
    """Return the format of packed matrices for `kind`, or None if matrices are not to be packed.

    Args:
        widths: the number of inputs of each matrix.
        packed: whether to pack the matrices; None to pack them if possible and `by_default`.
        bits: the size of rounded activations. See `jspec.models.packed`.

    Raises:
        ValueError: the number of inputs of a matrix is not a multiple of 32, which `kind` or `packed` requires.
    """
    unsuited = next(((name, width) for name, width in widths.items() if width % GROUP), None)
    if unsuited is None:
        packed = by_default and native.register(ProductKernel(_FORMATS[kind], bits)) if packed is None else packed
        return _FORMATS[kind] if packed else None
    if packed or kind == "int4":
        remedy = 'use quantize="int8"' + " without packed=True" * bool(packed)
        raise ValueError(
            f"{unsuited[0]} has {unsuited[1]} inputs, but {'packed ' * bool(packed)}{kind} weights need a multiple of "
            f"{GROUP}; {remedy}."
        )
    return None


_Source: TypeAlias = Array | np.ndarray | Sequence[MatrixPart]  # ``[in, out]``, or parts


def quantize_matrix(
    module: Linear | Embed, source: _Source, kind: str, format: str | None, bits: int, name: str
) -> None:
    """Quantise `source` to `kind` and store it in `module`.

    A matrix that is quantised already stays as it is if it has the required form and takes no more bits.

    Args:
        format: the result of `packed_format`. None stands for a `QuantizedMatrix`.

    Raises:
        ValueError: a weight is not finite.
    """
    parts = () if isinstance(source, Array | np.ndarray) else source
    packed = [part for part in parts if isinstance(part, PackedMatrix)]
    if parts and all(part.format in (kind, "int4") for part in parts):
        set_parts(module, parts)
    elif format is None:
        set_parts(module, [quantized(_as_array(source), kind, name)])
    elif packed:
        set_parts(module, [quantized_part(part, format, bits, name) for part in packed])
    else:
        set_parts(module, [quantized_matrix(np.asarray(_as_array(source)).T, format, bits, name)])


def _as_array(source: _Source) -> Array:
    """Return the matrix as ``[in, out]``."""
    return jnp.asarray(source if isinstance(source, Array | np.ndarray) else widen(source).T)


def quantized(weight: Array, kind: str, name: str) -> QuantizedMatrix:
    """Return ``weight[in, out]`` quantised to `kind`.

    Raises:
        ValueError: a weight is not finite, so no scale can represent its group.
    """
    if kind == "int8":
        codes, scales = cast(tuple[Array, Array], _int8(weight))
    else:
        codes, scales = cast(tuple[Array, Array], _int4(weight, _checked_group_size(weight, name)))
    if not jnp.isfinite(scales).all():
        raise ValueError(
            f"{name} has a value that is not finite, which {kind} cannot hold; do not quantize this model."
        )
    return QuantizedMatrix(codes, scales)


def _checked_group_size(weight: Array, name: str) -> int:
    """Return the size of int4's groups in ``weight[in, out]``.

    Raises:
        ValueError: a group would span two devices.
    """
    size = group_size(weight.shape[0], "int4")
    on_device = weight.sharding.shard_shape(weight.shape)[0]
    if on_device % size:
        raise ValueError(
            f"{name} has {on_device} inputs on each device, but int4 needs a multiple of {size}, so that no group "
            'spans two devices; use another sharding, or quantize="int8".'
        )
    return size


def packed_quantized_matrices(model: Llama) -> list[PackedMatrix]:
    """Return the model's packed matrices that are stored in a quantised format."""
    return [part for part in all_parts(model) if isinstance(part, PackedMatrix) and part.format not in FLOAT_FORMATS]


def is_packed_by_default(dtype: jnp.dtype) -> bool:
    """Return whether `jspec.load` packs an unsharded model of this dtype by default."""
    return jax.default_backend() == "cpu" and dtype == jnp.float32 and native.is_default()


def _can_be_packed(module: nnx.Module, dtype: jnp.dtype) -> bool:
    """Return whether `jspec.load` would pack a model with such leaves by default."""
    leaves = jax.tree.leaves(module)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    devices = {device for leaf in leaves if isinstance(leaf, Array) for device in leaf.devices()}
    return len(devices) <= 1 and is_packed_by_default(dtype)


def _width(module: Linear | Embed) -> int:
    """Return the number of inputs of a matrix."""
    return module.weight.shape[0] if module.parts is None else module.parts[0].in_size


def _source(module: Linear | Embed) -> _Source:
    """Return the matrix of `module` for `quantize_matrix`."""
    return module.weight[...] if module.parts is None else list(module.parts)


@jax.jit
def _int8(weight: Array) -> tuple[Array, Array]:
    """Return the codes and scales of ``weight[in, out]`` as a single group, computed in float32."""
    weight = weight.astype(jnp.float32)
    scales = _nonzero(jnp.abs(weight).max(axis=0) / 127)
    return jnp.round(weight / scales).astype(jnp.int8).T[None], scales[None]


@functools.partial(jax.jit, static_argnums=1)
def _int4(weight: Array, size: int) -> tuple[Array, Array]:
    """Return the codes and scales of ``weight[in, out]`` in groups of `size` inputs, computed in float32."""
    groups = weight.astype(jnp.float32).reshape(-1, size, weight.shape[1])
    largest, least = groups.max(axis=1, keepdims=True), groups.min(axis=1, keepdims=True)
    scales = _nonzero(jnp.where(largest >= -least, largest, least) / -8)
    codes = jnp.clip(jnp.round(groups / scales), -8, 7).astype(jnp.int4)
    return codes.swapaxes(1, 2), scales[:, 0]


def _nonzero(scales: Array) -> Array:
    """Return `scales` with 1 in place of zeros and subnormal values, which a device may flush to zero.

    NaN is kept, so that the caller can detect it.
    """
    return jnp.where(jnp.abs(scales) < cast(float, jnp.finfo(jnp.float32).tiny), 1, scales)
