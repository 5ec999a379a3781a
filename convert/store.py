"""Converted directories: arrays in an Orbax checkpoint, with config, tokenizer, layout and manifest."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from convert import blocks, dtypes, manifest
from convert.config import LlamaConfig
from convert.errors import CheckpointError, brief, listing, raised_alone
from convert.json_fields import Fields
from convert.json_file import read_object
from convert.keymap import shapes
from convert.safetensors_reader import row_chunks

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding
    from orbax.checkpoint import v1 as ocp

ARRAYS = "arrays"
DESCRIPTION = "jspec_checkpoint.json"
_CHUNK_BYTES = 16 * 2**20
_GROUP_BYTES = 32 * 2**20
_FORMAT = {"format": "jspec checkpoint", "version": 1}


def is_store(directory: Path) -> bool:
    """Return whether `directory` is a converted checkpoint, even a damaged one.

    A manifest or an arrays folder beside safetensors files belongs to another program.
    """
    if (directory / DESCRIPTION).exists():
        return True
    named = any((directory / name).exists() for name in (ARRAYS, manifest.NAME))
    return named and not any(directory.glob("*.safetensors"))


def verify(directory: Path) -> None:
    """Check every byte of a converted directory.

    Raises:
        CheckpointError: a bit differs from what was written, or the format has another version.
    """
    manifest.verify(directory)
    found = describe(directory)
    if {key: found.get(key) for key in _FORMAT} != _FORMAT:
        raise CheckpointError(
            f"{directory / DESCRIPTION} is not of the format {_FORMAT}; convert the source again with this version."
        )


def describe(directory: Path) -> Fields:
    """Return the content of the description: `dtype` and `files` (the layout of the source's safetensors files).

    Raises:
        CheckpointError: the description is missing or not JSON.
    """
    return read_object(directory / DESCRIPTION)


def _arrays(directory: Path) -> str:
    return str(directory.absolute() / ARRAYS)  # Orbax does not accept relative paths


def _context() -> "ocp.Context":
    from orbax.checkpoint import v1 as ocp  # lazily, because importing it takes over a second

    context = ocp.Context()
    # Without copying and compression, writing needs no memory beyond the arrays and takes a third of the time.
    context.memory.deepcopy_host_arrays = False
    context.array.saving.use_compression = False
    context.pytree.loading.partial_load = True  # `_check` has compared the names already
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    return context


def write(directory: Path, params: dict[str, np.ndarray], files: Mapping[str, object]) -> None:
    """Write the arrays and the description to a directory under construction.

    Raises:
        CheckpointError: Orbax could not write the arrays.
    """
    from orbax.checkpoint import v1 as ocp

    dtype = next(iter(params.values())).dtype.name
    description = json.dumps(_FORMAT | {"dtype": dtype, "files": files}, indent=1)
    (directory / DESCRIPTION).write_text(description + "\n", encoding="utf-8")
    try:
        with raised_alone(), _context():
            ocp.save(_arrays(directory), params)
    except Exception as error:  # the storage layer reports a full disk in several ways
        raise CheckpointError(
            f"the arrays could not be written to {directory} ({brief(error)}); check the disk's free space and "
            "permissions."
        ) from error


def stream(directory: Path, config: LlamaConfig, dtype: np.dtype | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the (name, array) pairs of a verified directory, cast to `dtype` unless it is None.

    Raises:
        CheckpointError: names, shapes or dtype differ from the config's, or a value does not fit `dtype`.
    """
    stored = dtypes.parse(describe(directory).get("dtype"))
    _check(directory, {name: (shape, stored) for name, shape in shapes(config).items()})
    for group in _groups(config, stored):
        arrays = _read(directory, {name: np.empty(shape, dtype or stored) for name, shape in group.items()})
        for name in group:
            for rows in row_chunks(arrays[name].shape, arrays[name].itemsize):
                dtypes.check_cast(arrays[name][rows], stored, name)
            yield name, arrays.pop(name)


def stream_sharded(
    directory: Path,
    config: LlamaConfig,
    dtype: np.dtype,
    sharding: "Callable[[str, tuple[int, ...]], Sharding]",
) -> "Iterator[tuple[str, jax.Array]]":
    """Yield (name, JAX array) pairs from a verified directory. Each process requests only its own parts.

    Args:
        sharding: a function from an array's name and shape to its sharding.

    Raises:
        CheckpointError: names, shapes or dtype differ from the config's, or an array cannot be read.
    """
    import jax

    stored = dtypes.parse(describe(directory).get("dtype"))
    _check(directory, {name: (shape, stored) for name, shape in shapes(config).items()})
    for group in _groups(config, stored):
        abstract = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(name, shape)) for name, shape in group.items()
        }
        for name, array in _read(directory, abstract).items():
            if dtype not in (stored, dtypes.BY_NAME["float32"]):
                dtypes.check_finite(bool(jax.numpy.isfinite(array).all()), dtype, name)
            yield name, array


def stream_packed(
    directory: Path, config: LlamaConfig, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray | blocks.StoredParts]]:
    """Yield the same arrays as `stream`, but leave matrices of 16-bit floats as they are stored.

    Raises:
        CheckpointError: under the same conditions as `stream`.
    """
    stored = dtypes.parse(describe(directory).get("dtype"))
    if stored == dtypes.BY_NAME["float32"]:
        yield from stream(directory, config, dtype)
        return
    for name, array in stream(directory, config, None):
        if array.ndim == 2:
            yield name, blocks.from_array(array)
            continue
        with np.errstate(over="ignore"):
            vector = array.astype(dtype)
        dtypes.check_cast(vector, stored, name)
        yield name, vector


def _read(directory: Path, abstract: Mapping[str, object]) -> dict[str, Any]:
    """Return arrays of the kind, shape, dtype and sharding that `abstract` declares."""
    from orbax.checkpoint import v1 as ocp

    try:
        with raised_alone(), _context():
            return ocp.load(_arrays(directory), abstract)
    except Exception as error:  # Orbax has no common base class for its errors
        raise CheckpointError(
            f"{directory / ARRAYS} cannot be read ({brief(error)}); convert the source again."
        ) from error


def _groups(config: LlamaConfig, stored: np.dtype) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield groups name -> shape of at most 32 MiB or of one array, because Orbax prefetches everything in a call."""
    group: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes(config).items():
        nbytes = stored.itemsize * math.prod(shape)
        if group and size + nbytes > _GROUP_BYTES:
            yield group
            group, size = {}, 0
        group[name] = shape
        size += nbytes
    yield group


def _check(directory: Path, expected: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Check names, shapes and dtypes, because Orbax returns arrays in their stored shape, not the requested one."""
    from orbax.checkpoint import v1 as ocp

    try:
        found = ocp.metadata(_arrays(directory)).metadata
        if found is None:  # Orbax returns None if it could not read the metadata
            raise ValueError("Orbax found no array metadata")
    except Exception as error:
        raise CheckpointError(
            f"{directory / ARRAYS} cannot be read ({brief(error)}); convert the source again."
        ) from error
    actual = {name: (tuple(leaf.shape), np.dtype(leaf.dtype)) for name, leaf in found.items()}
    wrong = {name for name, _ in actual.items() ^ expected.items()}
    if wrong:
        raise CheckpointError(
            f"{directory / ARRAYS} does not fit config.json in {listing(wrong)}; convert the source again."
        )
