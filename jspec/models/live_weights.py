"""New weights for a model in memory, by their Hugging Face names."""

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
from convert.errors import listing
from jspec.models.array_layout import lay_out
from jspec.models.groups import quantized_matrix
from jspec.models.layers import Embed, Linear
from jspec.models.llama import Llama, matrices
from jspec.models.packed import PackedMatrix
from jspec.models.quantize import quantized

_FLOATS = {"BF16": jnp.bfloat16, "F16": jnp.float16}
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

    Each weight keeps its dtype, devices and form, so compiled programs remain valid. Values are rounded to the dtype.
    Fused projections are assembled, and matrices that are packed or quantised are packed or quantised again. If the
    model belongs to a `jspec.engine.Engine`, call its `update` method afterwards.

    Args:
        model: any Llama.
        arrays: a weight ``[out, in]`` for each Hugging Face name, such as "model.layers.0.self_attn.q_proj.weight".
            NumPy arrays, JAX arrays and all tensors that support DLPack are accepted, so a PyTorch module's
            `state_dict` is, too. If the model uses its embedding as the output head, "lm_head.weight" is optional, and
            must equal the embedding.

    Raises:
        ValueError: the model's vocabulary is reduced; names are missing or unknown; a weight has another shape, is not
            floating-point, or does not fit the dtype; the head and the embedding differ; or a matrix is packed in a
            format that jspec cannot write. The model is unchanged, unless a value does not fit.
    """
    if model.head.num_tokens != model.config.vocab_size:
        raise ValueError(
            "The model's output head holds only some tokens; load the weights into the original model, and reduce its "
            "vocabulary again."
        )
    _check(arrays, model.config)
    owners, leaves = matrices(model), leaves_by_name(model)
    for name, module in owners.items():
        check_writable(module, name)
    for entry in keymap.entries(model.config):
        parts = [as_array(arrays[part.hf_name]) for part in entry.parts]
        array = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        if entry.name in owners:
            write_matrix(owners[entry.name], array, entry.name)
        else:
            write(leaves[entry.name], array, entry.name)
    lay_out(model)


def leaves_by_name(model: Llama) -> dict[str, nnx.Variable[Array]]:
    """Return the weights of `model` by jspec's names for them."""
    state = cast("list[tuple[tuple[object, ...], nnx.Variable[Array]]]", nnx.to_flat_state(nnx.state(model)))
    return {".".join(map(str, path)): leaf for path, leaf in state}


def check_writable(module: Linear | Embed, name: str) -> None:
    """Raise ValueError if the matrix of `module` is packed in a format that jspec reads but does not write."""
    for part in module.parts or ():
        if part.format not in _WRITABLE:
            raise ValueError(
                f"{name} is stored in {part.format}, which jspec cannot write; load the model with packed=False."
            )


def write_matrix(module: Linear | Embed, weight: Array, name: str) -> None:
    """Replace the matrix of `module` by ``weight[out, in]``, in the same form.

    Raises:
        ValueError: a value does not fit the form.
    """
    if module.parts is None:
        return write(module.weight, weight.T, name)
    at = 0
    for part in module.parts:
        rows = weight[at : at + part.out_size]
        at += part.out_size
        if not isinstance(part, PackedMatrix):
            codes = quantized(rows.T, part.format, name)
            write(part.codes, codes.codes[...], name)
            write(part.scales, codes.scales[...], name)
        elif part.format in _FLOATS:
            (stored,) = from_array(np.asarray(_cast(rows, _FLOATS[part.format], name)))
            write(part.tiles, jax.device_put(stored.tiles), name)
        else:
            again = quantized_matrix(np.asarray(rows), part.format, part.activation_bits, name)
            write(part.tiles, again.tiles[...], name)
    return None


def write(leaf: nnx.Variable[Array], array: Array, name: str) -> None:
    """Replace the value of `leaf` by `array`, with the same dtype and on the same devices."""
    old = leaf[...]
    array = _cast(array, old.dtype, name)
    if not _is_traced(array) and not _is_traced(old) and array.sharding != old.sharding:
        array = jax.device_put(array, old.sharding)
    leaf.set_value(array)


def _is_traced(array: Array) -> bool:
    return isinstance(array, jax.core.Tracer)


def _cast(array: Array, dtype: jnp.dtype, name: str) -> Array:
    """Return `array` in `dtype`. Raise ValueError if a finite value becomes infinite."""
    found = array.astype(dtype)
    narrows = array.dtype != dtype and dtype == jnp.float16
    if narrows and not _is_traced(array) and bool((jnp.isinf(found) & jnp.isfinite(array)).any()):
        raise ValueError(f"{name} has values that float16 cannot hold; load the model in another dtype.")
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
            f"The weights have unexpected shapes: {listing(wrong)}. The model has {name} {list(expected[name])}; pass "
            "weights of the same model, as [out, in]."
        )
    if integers := [name for name in expected if "float" not in str(arrays[name].dtype)]:
        raise ValueError(f"The weights {listing(integers)} are not floating-point; dequantise them first.")
    pair = [as_array(arrays[name]) for name in (keymap.HEAD, keymap.EMBEDDING) if has_tied_head]
    if pair and not bool(jnp.array_equal(pair[0], pair[1])):
        raise ValueError(
            f"{keymap.HEAD} differs from {keymap.EMBEDDING}, but the model uses its embedding as the output head; "
            "leave it out."
        )


def as_array(value: Weight) -> Array:
    """Return `value` as a JAX array, without a copy if possible."""
    return jnp.asarray(value) if isinstance(value, jax.Array | np.ndarray) else jnp.from_dlpack(value)
