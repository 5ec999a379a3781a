# pyright: reportUnknownVariableType=false
"""File I/O for Medusa heads: `load` fills modules with the arrays that `convert` reads, and `save` writes them."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from convert import dtypes
from convert.errors import CheckpointError
from convert.heads import medusa_files
from convert.heads.medusa_config import FORMATS, MedusaConfig, MedusaOrigin, usual_origin
from convert.keymap import MEDUSA
from jspec.drafters.heads.module_arrays import variables
from jspec.models.llama import Llama
from jspec.models.load import as_stored, default_dtype

Head = TypeVar("Head", bound=nnx.Module)
Make = Callable[[MedusaConfig, jnp.dtype, nnx.Rngs], Head]


def load(
    make: Make[Head], source: str | Path, target: Llama | None, dtype: DTypeLike | None
) -> tuple[tuple[Head, ...], MedusaOrigin]:
    """Return heads that are created by `make`, and their origin. See `MedusaDrafter.load`."""
    files = medusa_files.read(source)
    chosen = dtypes.parse(default_dtype() if dtype is None else dtype)
    config = files.config
    if target is not None:
        _check_target_of(config, target)
    heads = tuple(nnx.eval_shape(lambda: make(config, jnp.dtype(chosen), nnx.Rngs(0))) for _ in range(config.num_heads))
    leaves = {f"{i}.{name}": leaf for i, head in enumerate(heads) for name, leaf in variables(head).items()}
    first = leaves["0.lm_head.weight"]
    for name, array in files.arrays(chosen):
        leaves.pop(name).set_value(jnp.asarray(array).T)
    for name, leaf in leaves.items():  # missing from the files: biases, or output heads after the first
        leaf.set_value(jnp.zeros(leaf.shape, leaf.dtype) if name.endswith("bias") else first[...])
    return heads, files.origin if dtype is None else dataclasses.replace(files.origin, dtype=None)


def save(
    heads: Sequence[nnx.Module], sizes: MedusaConfig, origin: MedusaOrigin | None, destination: str | Path, layout: str
) -> Path:
    """Save heads. See `MedusaDrafter.save`."""
    if layout not in FORMATS:
        raise CheckpointError(f"format {layout!r} is unknown; choose one of {', '.join(FORMATS)}.")
    arrays = {
        f"{i}.{name}": np.ascontiguousarray(np.asarray(leaf[...]).T)
        for i, head in enumerate(heads)
        for name, leaf in variables(head).items()
    }
    arrays = as_stored(arrays, None if origin is None else origin.dtype)
    # If heads were trained with their target, the names and config of their files describe both.
    same = origin is not None and origin.layout == layout and origin.prefix != MEDUSA
    how = origin if origin is not None and same else usual_origin(layout)
    biased = any(array.any() for name, array in arrays.items() if name.endswith("bias"))
    outputs = [array for name, array in arrays.items() if name.endswith("lm_head.weight")]
    alike = all(np.array_equal(outputs[0], array) for array in outputs)
    how = dataclasses.replace(how, biased=how.biased or biased, shared=how.shared if alike else None)
    return medusa_files.write(destination, sizes, arrays, how)


def _check_target_of(config: MedusaConfig, target: Llama) -> None:
    sizes = target.config
    for name, own, found in (
        ("hidden size", config.hidden_size, sizes.hidden_size),
        ("vocabulary", config.vocab_size, sizes.vocab_size),
    ):
        if own != found:
            raise ValueError(
                f"The Medusa heads were made for a target whose {name} is {own}, but this target's is {found}; "
                "use heads that were trained for this target."
            )
