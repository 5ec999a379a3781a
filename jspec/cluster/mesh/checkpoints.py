"""Checkpoints that several processes load together."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from convert import dtypes, manifest, store, weight_files
from convert.config import read_config
from convert.source import resolve_weights
from jspec.cluster.mesh.processes import check_same
from jspec.core.sharding import tensor_parallel
from jspec.models.llama import Llama
from jspec.models.load import default_dtype, load

_MAX_HASHED_WHOLE = 2**20  # bytes; larger files are sampled
_SAMPLE_BYTES, _SAMPLE_INTERVAL = 2**16, 2**26


def load_on_mesh(
    source: str | Path, mesh: Mesh, axis: str = "model", dtype: DTypeLike | None = None, quantize: str | None = None
) -> Llama:
    """Load a model whose weights are sharded along one axis of a mesh. All processes call this together.

    Each process keeps only the parts of the weights that its devices hold, and reads files in chunks of 16 MiB. Each
    process checks every byte of a converted directory, and Orbax then restores it in groups of arrays of at most 32
    MiB, or one larger array at a time.

    Args:
        source, dtype, quantize: as in `jspec.load`. The checkpoint must be on every machine.
        mesh: a mesh of the devices of all processes.
        axis: the mesh axis that divides the weights. They are replicated over the other axes.

    Raises:
        ValueError: the axis does not exist or does not divide the model's heads; the processes have different
            checkpoints or dtypes, or one of them cannot read the checkpoint; or any of the reasons listed under
            `jspec.load`.
    """
    sharding, size = tensor_parallel(mesh, axis), int(mesh.shape[axis])
    kind = dtypes.parse(default_dtype() if dtype is None else dtype)

    files = Path(source)

    def checksum() -> str:
        nonlocal files
        files = resolve_weights(source)
        heads = read_config(files).num_key_value_heads
        if heads % size:
            raise ValueError(
                f"The mesh axis {axis!r} has size {size}, which does not divide the model's number of key/value heads, "
                f"{heads}; use an axis whose size divides {heads}."
            )
        return f"{fingerprint(files)} ({kind}, quantize={quantize})"

    check_same(f"checkpoint at {source}", checksum)
    return load(files, kind, quantize, sharding)  # the files that were compared


def fingerprint(files: Path) -> str:
    """Return a checksum of a checkpoint's configuration and weights.

    For a converted directory, it is that of the manifest, which holds a checksum of every file. Otherwise, it covers
    the names and sizes of the files, the contents of small files, and samples of large ones: one every 64 MiB, and the
    end.
    """
    checksum = hashlib.sha256()
    for file in _files(files):
        checksum.update(f"{file.name if files.is_dir() else ''} {file.stat().st_size}\n".encode())
        for part in _samples(file):
            checksum.update(part)
    return checksum.hexdigest()[:16]


def _files(files: Path) -> list[Path]:
    if files.is_file():
        return [files]
    if store.is_store(files):
        return [files / manifest.NAME]
    return [files / "config.json", *sorted(weight_files.find(files).files)]


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= _MAX_HASHED_WHOLE:
            yield stream.read()
            return
        for start in (*range(0, size, _SAMPLE_INTERVAL), size - _SAMPLE_BYTES):
            stream.seek(start)
            yield stream.read(_SAMPLE_BYTES)
