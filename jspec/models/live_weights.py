"""Replacement of a model's weights in memory, by Hugging Face names."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from convert import keymap
from convert.blocks import from_array
from convert.config import LlamaConfig
from convert.errors import brief, listing
from jspec.models.array_layout import lay_out
from jspec.models.groups import quantized_matrix
from jspec.models.layers import Embed, Linear
from jspec.models.llama import Llama, matrices, stored_orders
from jspec.models.packed import PackedMatrix
from jspec.models.quantize import quantized

_FLOATS = {"BF16": jnp.bfloat16, "F16": jnp.float16}
_DTYPES = "float32", "bfloat16", "float16", "float64"
_WRITABLE = (*_FLOATS, "Q8_0", "Q4_1", "int8", "int4")


class DLPackTensor(Protocol):
    """A tensor of another library, such as PyTorch."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> object: ...

    def __dlpack__(self) -> object: ...


Weight: TypeAlias = Array | np.ndarray | DLPackTensor


def load_weights(model: Llama, arrays: Mapping[str, Weight]) -> None:
    """Replace all weights of `model` in place.

    Each weight keeps its dtype and its devices, so compiled programs remain valid. Values are rounded to the dtype.
    Fused projections are assembled, and matrices that are packed or quantised are packed or quantised again. If the
    model belongs to a `jspec.engine.Engine`, call its `update` method afterwards.

    Args:
        model: the model to update, with its whole vocabulary.
        arrays: a weight ``[out, in]`` for each Hugging Face name, such as "model.layers.0.self_attn.q_proj.weight". The
            values may be NumPy arrays, JAX arrays or tensors that support DLPack, such as those of a PyTorch
            `state_dict()`. If the model uses its embedding as the output head, "lm_head.weight" is optional; if given,
            it must equal the embedding.

    Raises:
        ValueError: the model's vocabulary is reduced; names are missing or unknown; a weight has the wrong shape, has a
            dtype other than float32, bfloat16, float16 or float64, is traced, cannot be read, or does not fit the
            model's dtype; the output head and the tied embedding differ; or a matrix is packed in a format that jspec
            cannot write. If a value does not fit, the model may be partly updated; all other errors leave it unchanged.
    """
    check_whole_vocabulary(model)
    _check(arrays, model.config)
    # Read tensors of other libraries first, because this can fail. It does not copy them, unlike NumPy arrays.
    names = keymap.hf_shapes(model.config)
    arrays = {
        name: arrays[name] if isinstance(arrays[name], np.ndarray) else as_array(name, arrays[name]) for name in names
    }
    owners, leaves, orders = matrices(model), leaves_by_name(model), stored_orders(model)
    for name, module in owners.items():
        check_writable(module, name)
    for entry in keymap.entries(model.config):
        array = jnp.concatenate([as_array(part.hf_name, arrays[part.hf_name]) for part in entry.parts])
        if entry.name in orders:
            array = array[orders[entry.name]]
        if entry.name in owners:
            write_matrix(owners[entry.name], array, entry.name)
        else:
            # A matrix is transposed or packed. Copy a vector, because the caller may change or delete its memory.
            write(leaves[entry.name], jnp.array(array, copy=True), entry.name)
    lay_out(model)
    # Wait for the copies, because the caller may change the memory of a tensor at any time.
    jax.block_until_ready([leaf[...] for leaf in leaves_by_name(model).values()])


def leaves_by_name(model: Llama) -> dict[str, nnx.Variable[Array]]:
    """Return the weights of `model` by jspec's names for them."""
    state = cast("list[tuple[tuple[object, ...], nnx.Variable[Array]]]", nnx.to_flat_state(nnx.state(model)))
    return {".".join(map(str, path)): leaf for path, leaf in state}


def check_whole_vocabulary(model: Llama) -> None:
    """Raise ValueError if the output head of `model` was replaced, as in a drafter with a reduced vocabulary."""
    if (model.lm_head is None) != model.config.tie_word_embeddings or model.head.num_tokens != model.config.vocab_size:
        raise ValueError(
            "The model's output head covers only part of the vocabulary; update the original model, then reduce its "
            "vocabulary again."
        )


def check_writable(module: Linear | Embed, name: str) -> None:
    """Raise ValueError if the matrix of `module` is packed in a format that jspec reads but does not write."""
    for part in module.parts or ():
        if part.format not in _WRITABLE:
            raise ValueError(
                f"{name} is stored in {part.format}, which jspec cannot write; load the model with packed=False."
            )


def write_matrix(module: Linear | Embed, weight: Array, name: str) -> None:
    """Replace the matrix of `module` with ``weight[out, in]``, packed or quantised as before.

    Raises:
        ValueError: a value does not fit the dtype, or cannot be quantised.
    """
    if module.parts is None:
        return write(module.weight, weight.T, name)
    first_row = 0
    for part in module.parts:
        rows = weight[first_row : first_row + part.out_size]
        first_row += part.out_size
        if not isinstance(part, PackedMatrix):
            codes = quantized(rows.T, part.format, name)
            write(part.codes, codes.codes[...], name)
            write(part.scales, codes.scales[...], name)
        elif part.format in _FLOATS:
            (stored,) = from_array(np.asarray(_cast(rows, _FLOATS[part.format], name)))
            write(part.tiles, jax.device_put(stored.tiles), name)
        else:
            requantized = quantized_matrix(np.asarray(rows), part.format, part.activation_bits, name)
            write(part.tiles, requantized.tiles[...], name)
    return None


def write(leaf: nnx.Variable[Array], array: Array, name: str) -> None:
    """Replace the value of `leaf` with `array`, in the same dtype and on the same devices."""
    old = leaf[...]
    array = _cast(array, old.dtype, name)
    if array.sharding != old.sharding:
        array = jax.device_put(array, old.sharding)
    leaf.set_value(array)


def _cast(array: Array, dtype: jnp.dtype, name: str) -> Array:
    """Return `array` in `dtype`. Raise ValueError if a finite value exceeds float16."""
    found = array.astype(dtype)
    if array.dtype != dtype and dtype == jnp.float16 and bool((jnp.isinf(found) & jnp.isfinite(array)).any()):
        raise ValueError(
            f'{name} has values that float16 cannot hold; load the model with dtype="float32" and packed=False.'
        )
    return found


def _check(arrays: Mapping[str, Weight], config: LlamaConfig) -> None:
    """Check the names, shapes and types of all weights that are not ignored. See `load_weights`."""
    expected = keymap.hf_shapes(config)
    found = {name: tuple(value.shape) for name, value in arrays.items() if not keymap.is_ignored(name, config)}
    has_tied_head = config.tie_word_embeddings and found.pop(keymap.HEAD, None) is not None
    if missing := expected.keys() - found.keys():
        raise ValueError(f"The weights lack {listing(missing)}; pass all weights of the model.")
    if unknown := found.keys() - expected.keys():
        raise ValueError(
            f"The weights include {listing(unknown)}, which a model of this configuration does not have; pass only the "
            "model's weights, under their Hugging Face names."
        )
    if wrong := [f"{name} {list(found[name])}" for name in expected if found[name] != expected[name]]:
        name = wrong[0].split(" ")[0]
        raise ValueError(
            f"The weights have unexpected shapes: {listing(wrong)}. In the model, {name} has shape "
            f"{list(expected[name])}; pass the same model's weights as [out, in]."
        )
    if others := [name for name in expected if str(arrays[name].dtype).removeprefix("torch.") not in _DTYPES]:
        raise ValueError(
            f"The weights {listing(others)} have the dtype {arrays[others[0]].dtype}; expected one of "
            f"{', '.join(_DTYPES)}, so dequantise them first."
        )
    if traced := [name for name in expected if isinstance(arrays[name], jax.core.Tracer)]:
        raise ValueError(f"The weights {listing(traced)} have no values inside jax.jit; call load_weights outside it.")
    head_and_embedding = [as_array(name, arrays[name]) for name in (keymap.HEAD, keymap.EMBEDDING) if has_tied_head]
    if head_and_embedding and not bool(jnp.array_equal(head_and_embedding[0], head_and_embedding[1])):
        raise ValueError(
            f"{keymap.HEAD} differs from {keymap.EMBEDDING}, but the model uses its embedding as the output head; "
            f"leave out {keymap.HEAD}."
        )


def as_array(name: str, value: Weight) -> Array:
    """Return `value` as a JAX array, without a copy if possible. Raise ValueError if JAX cannot read it."""
    if isinstance(value, jax.Array | np.ndarray):
        return jnp.asarray(value)
    try:
        return jnp.from_dlpack(value)
    except (BufferError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be read: {brief(error)}; pass tensor.detach().contiguous().") from error
