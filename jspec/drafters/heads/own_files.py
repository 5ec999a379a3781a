# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
"""Files in jspec's own format (config.json and model.safetensors), for drafters that no other program can read."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from convert import dtypes
from convert.errors import CheckpointError
from convert.from_hf import check_names, filled
from convert.heads import files as head_files
from convert.json_fields import Fields, flag, integer
from convert.keymap import Entry, Part
from convert.safetensors_reader import scan
from convert.to_hf import write_file
from convert.weight_files import SINGLE
from jspec.core.types import PyTree
from jspec.models.llama import Llama
from jspec.models.load import default_dtype


class InOwnFiles:
    """A mixin for drafters that can be saved and loaded. Arrays are stored by attribute name, next to the sizes.

    Attributes:
        KIND: the drafter's name in config.json and in `jspec.train_drafter`.
        SIZES: the arguments of ``untrained(target, ..., rngs=)`` and their types, int or bool.
        PARTS: the sizes whose product is the number of parts, each of which has its own arrays.
    """

    KIND: ClassVar[str]
    SIZES: ClassVar[dict[str, type]]
    PARTS: ClassVar[tuple[str, ...]] = ()

    def described(self) -> Fields:
        """Return, as JSON values, the drafter's sizes and all target properties that it depends on."""
        raise NotImplementedError

    @classmethod
    def untrained(cls, target: Llama, *, rngs: nnx.Rngs) -> Self:
        """Return a drafter with the given sizes, to fill with weights."""
        raise NotImplementedError

    def save(self, path: str | Path) -> Path:
        """Write config.json and model.safetensors to a new directory that `load` can read.

        Raises:
            convert.CheckpointError: `path` exists or cannot be written.
        """
        tensors = {name: np.asarray(leaf) for name, leaf in _named(self)}
        with head_files.new_own(Path(path), self.KIND, self.described()) as directory:
            write_file(directory / SINGLE, tensors, {"format": "pt"})
        return Path(path)

    @classmethod
    def load(cls, path: str | Path, target: Llama, dtype: DTypeLike | None = None) -> Self:
        """Load a drafter that was written by `save`.

        Args:
            path: a local directory, or a Hugging Face repo id.
            target: the `jspec.Llama` that the drafter was trained for.
            dtype: the dtype of the drafter's weights. Same as in `jspec.load`.

        Raises:
            convert.CheckpointError: the files have another format, or are damaged.
            ValueError: the drafter was made for another target.
        """
        directory = head_files.find(path, "pytorch_model.bin")
        raw = head_files.read_own(directory, cls.KIND)
        sizes = {name: (flag if kind is bool else integer)(raw, name) for name, kind in cls.SIZES.items()}
        _check_parts(directory, len(found := scan(directory)), {name: sizes[name] for name in cls.PARTS})
        made = jax.eval_shape(lambda: cls.untrained(target, **sizes, rngs=nnx.Rngs(0)))
        _check_target(cls.__name__, raw, made.described())
        chosen = jnp.dtype(dtypes.parse(default_dtype() if dtype is None else dtype))
        wanted = {name: leaf.shape for name, leaf in _named(made)}
        check_names(found, wanted, directory)
        entries = (Entry(name, shape, (Part(name, shape[0]),)) for name, shape in wanted.items())
        arrays = [jnp.asarray(array) for _, array in filled(found, entries, chosen)]
        return jax.tree.unflatten(jax.tree.structure(made), arrays)


def _named(drafter: PyTree) -> Iterator[tuple[str, Array]]:
    leaves: list[tuple[tuple[object, ...], Array]] = jax.tree_util.tree_flatten_with_path(drafter)[0]
    for path, leaf in leaves:
        yield jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"), leaf


def _check_parts(directory: Path, num_tensors: int, parts: dict[str, int]) -> None:
    """Raise CheckpointError if config.json declares more parts (heads, layers) than the file has tensors.

    With a damaged config, `load` would otherwise create all of these parts one by one.
    """
    if math.prod(parts.values()) > num_tensors:
        expected = ", ".join(f"{name} {size}" for name, size in parts.items())
        raise CheckpointError(
            f"{directory} has {num_tensors} tensors, but its config.json says {expected}; restore the config.json "
            "that belongs to these tensors."
        )


def _check_target(user: str, raw: Fields, wanted: Fields) -> None:
    for name, value in wanted.items():
        if raw.get(name) != value:
            raise ValueError(
                f"{user} was made for a target whose {name} is {raw.get(name)!r}, but this target's is {value!r}; "
                "use a drafter that was trained for this target."
            )
