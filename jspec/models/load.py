"""Checkpoint loading, which turns the arrays that `convert` reads into a `Llama`."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, Sharding
from jax.typing import ArrayLike, DTypeLike

from convert import dtypes
from convert.blocks import StoredParts
from convert.config import LlamaConfig
from convert.loading import stream, stream_packed, stream_parts
from convert.saving import save_new
from convert.source import resolve
from convert.stored_array import StoredArray
from jspec.core.devices import is_before_ampere
from jspec.core.sharding import Placement, TensorParallel, check_placement, place, place_parts, sharding_of, transposed
from jspec.models.array_layout import lay_out
from jspec.models.float16_check import check_fits_float16
from jspec.models.kernels.cpu import native
from jspec.models.llama import Llama, all_parts, matrices, set_parts, set_placement, stored_orders, widened
from jspec.models.matrix_parts import widen
from jspec.models.packed import ACTIVATION_BITS, PackedMatrix
from jspec.models.quantize import check_kind, is_packed_by_default, packed_format, quantize_matrix, widths_of

_Arrays: TypeAlias = Iterable[tuple[str, ArrayLike | StoredParts | StoredArray]]
_Leaves: TypeAlias = Iterable[tuple[tuple[str | int, ...], nnx.Param[Array]]]  # each with its path


def load(
    source: str | Path,
    dtype: DTypeLike | None = None,
    quantize: str | None = None,
    sharding: Placement | None = None,
    packed: bool | None = None,
    activation_bits: int = 24,
) -> Llama:
    """Load a model from a checkpoint.

    Args:
        source: a Hugging Face directory (config.json and safetensors), a Hugging Face repo id such as
            "meta-llama/Llama-3.2-1B", a directory written by ``jspec convert``, or a GGUF file. A GGUF file in a
            Hugging Face repo is written as "org/repo:file.gguf". Weights in AWQ, GPTQ, FP8 or compressed-tensors are
            dequantised while they are read.
        dtype: the dtype of activations, KV cache, and weights that are not packed. The default is float32 on CPU,
            bfloat16 on GPU and TPU, and float16 on a GPU without bfloat16, such as a T4.
        quantize: "int8" or "int4" quantises every matrix and never holds the whole model unquantised. See `quantize`.
            Norms, biases, activations and KV cache keep `dtype`.
        sharding: the placement of the weights: either one `jax.sharding.Sharding` for all weights, or a function that
            maps a weight's name and shape to a sharding, such as ``jspec.tensor_parallel(mesh)``. No device ever holds
            more than its own part. A quantised matrix is placed like the matrix that it replaces.
        packed: True keeps matrices as they are stored: in GGUF's blocks (`convert.blocks.FORMATS`), bfloat16 or
            float16. No weight changes. With `quantize`, matrices are stored in GGUF's blocks, too, so that a pass reads
            only the quantised weights. False widens matrices to `dtype`, or quantises them as on a GPU. By default,
            matrices are packed on a CPU with AVX-512 VNNI if `dtype` is float32 and `sharding` is not given. Without a
            C++ compiler, they are not.
        activation_bits: with 8 or 16, activations that multiply packed quantised weights are rounded, 32 at a time, to
            integers of that size. Passes over several rows are then faster. Rounding changes the model: every decoding
            function uses the distribution of the rounded model. It implies `packed`.

    Returns:
        The model. Its weights are on the default device unless `sharding` is given.

    Raises:
        convert.CheckpointError: the source is not a checkpoint of a supported family, or is damaged. The message says
            what was found and what was expected.
        ValueError: `packed` is True on a device other than a CPU, or with `sharding`; `activation_bits` is unknown or
            has no effect; `quantize` is unknown; a matrix has a size that the packed or quantised form does not
            support; a weight is not finite and so cannot be quantised; `sharding` cannot divide a weight; or the dtype
            is float16 and activations exceed 60,000 on a probe prompt.
        TypeError: `sharding` is neither a sharding nor a function, or the function returns another type.
    """
    if quantize is not None:
        check_kind(quantize)
    if sharding is not None:
        check_placement(sharding)
    dtype = dtypes.parse(default_dtype() if dtype is None else dtype)
    if activation_bits not in ACTIVATION_BITS:
        raise ValueError(f"activation_bits is {activation_bits!r}; expected 8, 16 or 24.")
    packed = True if packed is None and activation_bits < 24 else packed
    is_packed = _is_packed(packed, dtype, sharding)
    config, arrays = _stream(source, dtype, is_packed, sharding)
    if quantize is None:
        model = from_arrays(config, arrays, dtype, sharding, activation_bits)
    else:
        format = packed_format(quantize, widths_of(config), packed, is_packed, activation_bits)
        model = from_arrays(config, arrays, dtype, sharding, activation_bits, (quantize, format))
    if activation_bits < 24 and not _rounds_activations(model):
        raise ValueError(
            f"activation_bits={activation_bits} has no effect on {source}, because it applies only to quantised "
            "weights that are packed; leave it out."
        )
    if dtype == jnp.float16:
        check_fits_float16(model)
    return model


def _stream(
    source: str | Path, dtype: jnp.dtype, is_packed: bool, sharding: Placement | None
) -> tuple[LlamaConfig, _Arrays]:
    """Return the configuration and an iterator over the arrays. With several processes, no whole array is loaded.

    One process would read and dequantise an array once for each device that holds some of its columns.
    """
    if sharding is None or jax.process_count() == 1:
        config, _, arrays = stream_packed(source, dtype) if is_packed else stream(source, dtype, None)
        return config, arrays

    def stored(name: str, shape: tuple[int, ...]) -> Sharding:
        return transposed(sharding_of(name, shape[::-1], sharding), len(shape))

    config, _, parts = stream_parts(source, dtype, stored)
    return config, parts


def _is_packed(packed: bool | None, dtype: jnp.dtype, sharding: Placement | None) -> bool:
    """Return whether to load packed matrices. See `load`."""
    if packed and jax.default_backend() != "cpu":
        raise ValueError("Packed matrices are only supported on CPU; leave out packed=True and activation_bits.")
    if packed and sharding is not None:
        raise ValueError("Packed matrices cannot be sharded; leave out packed=True and activation_bits.")
    if packed is None:
        return sharding is None and is_packed_by_default(dtype)
    return packed


def _rounds_activations(model: Llama) -> bool:
    return any(isinstance(part, PackedMatrix) and part.activation_bits < 24 for part in all_parts(model))


def default_dtype() -> DTypeLike:
    """Return float32 on CPU, bfloat16 on GPU and TPU, and float16 on a GPU without bfloat16."""
    if jax.default_backend() == "cpu":
        return jnp.float32
    return jnp.float16 if is_before_ampere() else jnp.bfloat16


def as_stored(arrays: dict[str, np.ndarray], dtype: str | None) -> dict[str, np.ndarray]:
    """Return `arrays` in the dtype of their source files, if it is known and the conversion changes no value."""
    if dtype is None:
        return arrays
    with np.errstate(over="ignore"):
        cast = {name: array.astype(dtypes.parse(dtype)) for name, array in arrays.items()}
    same = all(np.array_equal(cast[name].astype(array.dtype), array, equal_nan=True) for name, array in arrays.items())
    return cast if same else arrays


def from_arrays(
    config: LlamaConfig,
    arrays: _Arrays,
    dtype: jnp.dtype,
    sharding: Placement | None = None,
    activation_bits: int = 24,
    quantized: tuple[str, str | None] | None = None,
) -> Llama:
    """Return a `Llama` built from `config` and (name, array) pairs, named and shaped as in `convert`.

    Arrays are moved to their devices one by one. Matrices are ``[out, in]`` in `convert` and ``[in, out]`` in the model
    (see `jspec.models.layers`), unless they are packed. Packed matrices are widened if there is no native kernel for
    their format, unless activations are rounded.

    Args:
        quantized: the kind to which to quantise matrices, and its `packed_format`.
    """
    model = nnx.eval_shape(lambda: Llama(config, dtype, rngs=nnx.Rngs(0)))
    if isinstance(sharding, TensorParallel):
        set_placement(model, sharding)
    leaves = {".".join(map(str, path)): leaf for path, leaf in cast(_Leaves, nnx.to_flat_state(nnx.state(model)))}
    owners, orders = matrices(model), stored_orders(model)
    for name, array in arrays:
        leaf = leaves.pop(name)
        if isinstance(array, tuple):
            source = _parts(array, activation_bits)
        elif sharding is None:
            source = jnp.asarray(array, dtype).T
        else:
            source = _placed(name, array, dtype, sharding, orders.get(name))
        if quantized is not None and name in owners:
            quantize_matrix(owners[name], source, *quantized, activation_bits, name)
        elif not isinstance(source, list):
            leaf.set_value(source)
        elif _stay_packed(source):
            set_parts(owners[name], source)
        else:
            leaf.set_value(widen(source).T.astype(dtype))
    if leaves:
        raise ValueError(f"arrays lacks {sorted(leaves)[0]}; expected every name of convert.shapes(config).")
    model.quantized = None if quantized is None else quantized[0]
    lay_out(model)
    return model


def _parts(stored: StoredParts, activation_bits: int) -> list[PackedMatrix]:
    return [PackedMatrix(jax.device_put(part.tiles), part.format, part.shape, activation_bits) for part in stored]


def _placed(
    name: str, array: ArrayLike | StoredArray, dtype: jnp.dtype, sharding: Placement, order: np.ndarray | None
) -> Array:
    """Return `array` on its devices, transposed, with its rows in `order` (None: unchanged)."""
    if isinstance(array, StoredArray):
        assert array.dtype == dtype
        stored = array if order is None else dataclasses.replace(array, order=order)
        return place_parts(name, array.shape[::-1], lambda index: stored.read(index[::-1]).T, sharding)
    where = sharding_of(name, np.shape(array)[::-1], sharding)
    if isinstance(array, Array) and array.sharding.device_set == where.device_set:  # already on the right devices
        return _compiled_transpose(where, None if order is None else tuple(order.tolist()))(array.astype(dtype))
    host_array = np.asarray(array, dtype)
    return place(name, (host_array if order is None else host_array[order]).T, sharding)


@functools.lru_cache
def _compiled_transpose(where: Sharding, order: tuple[int, ...] | None) -> Callable[[Array], Array]:
    """Return a compiled function that reorders an array's rows, transposes it and places the result at `where`."""

    def transpose(array: Array) -> Array:
        return (array if order is None else array[np.array(order)]).T

    run: Callable[[Array], Array] = transpose
    if isinstance(where, NamedSharding) and (axes := where.mesh.explicit_axes):
        run = cast(Callable[[Array], Array], jax.sharding.auto_axes(transpose, axes=axes, out_sharding=where))
    return cast(Callable[[Array], Array], jax.jit(run, out_shardings=where))


def _stay_packed(parts: list[PackedMatrix]) -> bool:
    have_kernels = all([native.register(part.kernel) for part in parts])
    return have_kernels or any(part.activation_bits < 24 for part in parts)


def save(model: Llama, destination: str | Path, tokenizer: str | Path | None) -> Path:
    """Save a model. See `jspec.ModelDrafter.save`."""
    if model.quantized is not None:
        raise ValueError(
            f"The model is {model.quantized} and cannot be saved; load it without quantize, and save that model."
        )
    model = widened(model)
    orders = {name: np.argsort(order) for name, order in stored_orders(model).items()}
    state = cast(_Leaves, nnx.to_flat_state(nnx.state(model)))
    leaves = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}
    arrays = {name: np.ascontiguousarray(leaf[..., orders.get(name, slice(None))].T) for name, leaf in leaves.items()}
    return save_new(model.config, arrays, destination, None if tokenizer is None else resolve(tokenizer))
