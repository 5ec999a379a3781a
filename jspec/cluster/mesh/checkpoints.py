"""Checkpoints that several processes load together."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from convert import store
from convert.config import read_config
from convert.source import resolve_weights
from jspec.cluster.mesh.processes import check_same
from jspec.core.sharding import tensor_parallel
from jspec.models.llama import Llama
from jspec.models.load import load

_SUFFIXES = ".safetensors", ".json", ".gguf"
_WHOLE = 2**20  # bytes; larger files are sampled
_SAMPLE, _STEP = 2**16, 2**26


def load_on_mesh(
    source: str | Path, mesh: Mesh, axis: str = "model", dtype: DTypeLike | None = None, quantize: str | None = None
) -> Llama:
    """Load a model whose weights are divided over one axis of a mesh. All processes call this together.

    Each process reads only the parts of the weights that its devices hold, 16 MiB of the files at a time. A converted
    directory is restored by Orbax, in groups of 32 MiB or of one array.

    Args:
        source, dtype, quantize: as in `jspec.load`. The checkpoint must be on every machine.
        mesh: a mesh of the devices of all processes.
        axis: the mesh axis that divides the weights. They are replicated over the other axes.

    Raises:
        ValueError: the axis does not exist or does not divide the model's heads; the processes have different
            checkpoints; or any of the reasons listed under `jspec.load`.
    """
    sharding = tensor_parallel(mesh, axis)
    files = resolve_weights(source)
    heads, size = read_config(files).num_key_value_heads, int(mesh.shape[axis])
    if heads % size:
        raise ValueError(
            f"The mesh axis {axis!r} has {size} devices, which do not divide the model's {heads} key/value heads; use "
            f"an axis whose size divides {heads}."
        )
    check_same(f"checkpoint at {source}", fingerprint(files))
    return load(source, dtype, quantize, sharding)


def fingerprint(files: Path) -> str:
    """Return a checksum of a checkpoint's configuration and weights.

    It covers the names and sizes of the files, small files, and samples of others: one every 64 MiB, and the end.
    """
    checksum = hashlib.sha256()
    found = [files] if files.is_file() else sorted(path for path in files.rglob("*") if path.is_file())
    for file in found:
        name = file.relative_to(files.parent if files.is_file() else files)
        if name.parts[0] != store.ARRAYS and name.suffix not in _SUFFIXES:
            continue
        checksum.update(f"{name.as_posix() if len(found) > 1 else ''} {file.stat().st_size}\n".encode())
        for part in _samples(file):
            checksum.update(part)
    return checksum.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _WHOLE:
            yield stream.read()
            return
        for start in (*range(0, size, _STEP), size - _SAMPLE):
            stream.seek(start)
            yield stream.read(_SAMPLE)
