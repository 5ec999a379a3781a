"""Checkpoints to models: what `convert` reads, placed into a `Llama`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert import dtypes
from convert.config import LlamaConfig
from convert.loading import stream
from convert.saving import save_new
from convert.source import resolve
from jspec.core.devices import is_before_ampere
from jspec.core.sharding import Placement, check_placement, place
from jspec.models.array_layout import lay_out
from jspec.models.float16_check import check_fits_float16
from jspec.models.llama import Llama
from jspec.models.quantize import check_kind, matrices, pack


def load(
    source: str | Path, dtype: Any = None, quantize: str | None = None, sharding: Placement | None = None
) -> Llama:
    """A model from a checkpoint.

    Args:
        source: a Hugging Face directory (config.json and safetensors), a Hugging Face hub id such as
            "meta-llama/Llama-3.2-1B", a directory written by ``jspec convert``, or a GGUF file, whose weights are
            dequantised.
        dtype: of weights, activations and cache; float32 on CPU and bfloat16 on GPU and TPU unless given, float16 on
            a GPU that has no bfloat16, such as a T4.
        quantize: "int8" stores every matrix as int8, see `quantize`, without ever holding the model unquantised; norms,
            biases, activations and cache keep `dtype`.
        sharding: where the weights are to lie: a `jax.sharding.Sharding` for all of them, or a function that gives one
            for a weight's name and shape, such as ``jspec.tensor_parallel(mesh)``. No device ever holds more than its
            part. Scales of int8 matrices lie where their columns do.

    Returns:
        The model, its weights on the default device unless `sharding` is given.

    Raises:
        convert.CheckpointError: the source is no checkpoint of a supported family, or a damaged one; says what was
            found and expected.
        ValueError: an unknown `quantize`, a weight that is not finite and so cannot be quantised, a `sharding` that
            cannot divide a weight, or float16 for a model whose activations, on a probe prompt, exceed 60,000.
        TypeError: `sharding` is none, or gives none.
    """
    if quantize is not None:
        check_kind(quantize)
    if sharding is not None:
        check_placement(sharding)
    dtype = dtypes.parse(default_dtype() if dtype is None else dtype)
    config, _, arrays = stream(source, dtype, None)
    model = from_arrays(config, arrays, dtype, quantize, sharding)
    if dtype == jnp.float16:
        check_fits_float16(model)
    return model


def default_dtype() -> Any:
    """float32 on CPU; on GPU and TPU bfloat16, or float16 where a GPU has none."""
    if jax.default_backend() == "cpu":
        return jnp.float32
    return jnp.float16 if is_before_ampere() else jnp.bfloat16


def as_stored(arrays: dict[str, np.ndarray], dtype: str | None) -> dict[str, np.ndarray]:
    """`arrays` in the dtype of the files that they come from, if there is one and no value changes by it."""
    if dtype is None:
        return arrays
    with np.errstate(over="ignore"):
        cast = {name: array.astype(dtypes.parse(dtype)) for name, array in arrays.items()}
    same = all(np.array_equal(cast[name].astype(array.dtype), array, equal_nan=True) for name, array in arrays.items())
    return cast if same else arrays


def from_arrays(
    config: LlamaConfig,
    arrays: Iterable[tuple[str, Any]],
    dtype: Any,
    quantize: str | None = None,
    sharding: Placement | None = None,
) -> Llama:
    """A `Llama` of `config` from (name, array) pairs as `convert` names and shapes them.

    They are moved to their devices, and quantised if asked for, one by one. Matrices are ``[out, in]`` in `convert` and
    ``[in, out]`` in the model (see `jspec.models.layers`).
    """
    model = nnx.eval_shape(lambda: Llama(config, dtype, rngs=nnx.Rngs(0)))
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}
    owners = {} if quantize is None else matrices(model)
    for name, array in arrays:
        leaf = leaves.pop(name)
        value = jnp.asarray(array, dtype).T if sharding is None else place(name, np.asarray(array, dtype).T, sharding)
        if name in owners:
            pack(owners[name], value, name)
        else:
            leaf.set_value(value)
    if leaves:
        raise ValueError(f"arrays lacks {sorted(leaves)[0]}; expected every name of convert.shapes(config).")
    lay_out(model)
    return model


def save(model: Llama, destination: str | Path, tokenizer: str | Path | None) -> Path:
    """See `jspec.ModelDrafter.save`."""
    if model.embed_tokens.scale is not None:
        raise ValueError("The model is int8, and files of it are not written; save it without quantising.")
    state = nnx.to_flat_state(nnx.state(model))
    arrays = {".".join(map(str, path)): np.ascontiguousarray(np.asarray(leaf[...]).T) for path, leaf in state}
    return save_new(model.config, arrays, destination, None if tokenizer is None else resolve(tokenizer))
