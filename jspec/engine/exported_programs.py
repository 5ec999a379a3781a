"""Exported programs on disk, so that a later process neither traces nor lowers them again.

JAX's persistent compilation cache stores compiled programs and finds them by their lowered form. Tracing and lowering
take Python about a second per program, and an engine has some twenty programs. This module stores the lowered forms
(`jax.export`) in the cache's directory. Like the compiled programs, they run unchecked.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import logging
import os
import pickle
import tempfile
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, TypeAlias, cast

import flax
import jax
import numpy as np
import psutil
from jax import export
from jax.sharding import SingleDeviceSharding
from jaxlib.version import __version__ as jaxlib_version

import convert
from convert.blocks import FORMATS
from jspec.core.types import PyTree
from jspec.engine.memory_budget import JaxDevice
from jspec.models.kernels import dispatch
from jspec.models.kernels.cpu import native
from jspec.models.kernels.cpu.log_sum_exp import LogSumExpKernel
from jspec.models.kernels.cpu.masked_attention import AttentionKernel
from jspec.models.kernels.cpu.native import Kernel
from jspec.models.kernels.cpu.product import ProductKernel
from jspec.models.kv_cache import KVCache
from jspec.models.packed import ACTIVATION_BITS, PackedMatrix

_LOG = logging.getLogger("jspec")
_SUFFIX = ".exported"
_MAX_FILES = 1000  # about 100 KB each; the oldest are deleted
# Packages whose versions or code are part of a file's name. Code of other packages may change without notice.
_PACKAGES = {"jspec", "convert", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "builtins", "collections", "functools"}
# Other versions of JAX or jspec may lack these kernels, but never read the file: its name depends on the versions.
_PRODUCTS = [ProductKernel(*kind) for kind in itertools.product(FORMATS, ACTIVATION_BITS)]
_NATIVE = AttentionKernel(), LogSumExpKernel(), *_PRODUCTS
_KERNELS = ["__gpu$xla.gpu.triton", *(kernel.target for kernel in _NATIVE)]
_SAME_VERSION = [export.DisabledSafetyCheck.custom_call(kernel) for kernel in _KERNELS]
_Leaf: TypeAlias = jax.Array | jax.ShapeDtypeStruct | np.generic | np.ndarray
_Stored: TypeAlias = tuple[export.Exported, Hashable]  # a function of flat arguments, and the structure of its result


def lower(program: Callable[..., PyTree], arguments: tuple[PyTree, ...], *parts: object) -> jax.stages.Lowered:
    """Lower a program that donates its second argument. Read its exported form from a file, or write that file.

    A program has no file if JAX has no local cache directory, if its arguments are not on a single device, if it uses
    code that jspec does not know, or if JAX cannot export it.

    Args:
        program: a function of `arguments`. Everything that it depends on, except for jspec's own code, is in `parts`.
        arguments: pytrees of arrays, or of their shapes and dtypes.
        parts: values that can be pickled.
    """
    leaves, structure = cast(tuple[list[_Leaf], Hashable], jax.tree.flatten(arguments))
    path = _path(leaves, structure, (*parts, _native_kernels(arguments, _device(leaves).platform)))
    if path is not None:
        try:
            return _lower_exported(path, program, arguments, leaves, structure)
        except Exception as error:  # an error of the program itself is raised below
            level = logging.WARNING if path.exists() else logging.DEBUG
            _LOG.log(level, "%s cannot be used: %s: %s", path, type(error).__name__, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return jax.jit(program, donate_argnums=1).lower(*arguments)


def _native_kernels(arguments: PyTree, platform: str) -> list[tuple[str, bool]]:
    """Register the native kernels that a program with these arguments may need.

    Return each kernel's name, and whether it could be registered.
    """
    if platform != "cpu":
        return []

    def has_kernel(node: object) -> bool:
        return isinstance(node, PackedMatrix | KVCache)

    kernels: set[Kernel] = set()
    for node in cast(list[object], jax.tree.leaves(arguments, is_leaf=has_kernel)):
        if isinstance(node, PackedMatrix):
            kernels.add(node.kernel)
        elif isinstance(node, KVCache):
            kernels.add(LogSumExpKernel())
            if any(keys.dtype == np.float32 for keys in node.keys):
                kernels.add(AttentionKernel())
    return sorted((kernel.target, native.register(kernel)) for kernel in kernels)


def _lower_exported(
    path: Path, program: Callable[..., PyTree], arguments: tuple[PyTree, ...], leaves: list[_Leaf], structure: Hashable
) -> jax.stages.Lowered:
    stored = _read(path)
    exported, result = stored or _export(program, leaves, structure, _platform(leaves))

    def call(*arguments: PyTree) -> PyTree:
        return jax.tree.unflatten(result, exported.call(*jax.tree.leaves(arguments)))

    lowered = jax.jit(call, donate_argnums=1).lower(*arguments)
    if stored is None and exported.nr_devices == 1:
        _write(path, exported, result)
    return lowered


def _export(program: Callable[..., PyTree], leaves: list[_Leaf], structure: Hashable, platform: str) -> _Stored:
    """Return `program` as an exported function of flat arguments, and the structure of its result."""
    results: list[Hashable] = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        values, result = cast(
            tuple[list[jax.Array], Hashable], jax.tree.flatten(program(*jax.tree.unflatten(structure, leaves)))
        )
        results.append(result)
        return values

    with dispatch.allow_kernels_in_exports():
        exported = export.export(jax.jit(flat), platforms=[platform], disabled_checks=_SAME_VERSION)(*leaves)
    return exported, results[-1]


def _device(leaves: list[_Leaf]) -> JaxDevice:
    """Return the device of the first array, or else JAX's default device."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return next(iter(cast(Iterable[JaxDevice], arrays[0].devices() if arrays else jax.devices())))


def _platform(leaves: list[_Leaf]) -> str:
    """Return the platform name that `jax.export` expects, which is "cuda" where JAX otherwise says "gpu"."""
    platform: str = _device(leaves).platform
    return export.default_export_platform() if platform == jax.default_backend() else platform


def _path(leaves: list[_Leaf], structure: Hashable, parts: tuple[object, ...]) -> Path | None:
    """Return the path of a program's file, or None if the program must not be stored."""
    config: Any = jax.config
    folder: str | None = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    if not folder or "://" in folder or not jax.sharding.get_abstract_mesh().empty:
        return None
    if not all(isinstance(leaf.sharding, SingleDeviceSharding) for leaf in leaves if isinstance(leaf, jax.Array)):
        return None
    code, content = _code(), _pickled((structure, parts))
    if code is None or content is None:
        return None
    device = _device(leaves)
    types = [str(jax.typeof(leaf)) if isinstance(leaf, jax.Array) else f"{leaf.shape}{leaf.dtype}" for leaf in leaves]
    settings = [setting for setting in sorted(config.values.items()) if "cache" not in setting[0]]
    names = code, types, settings, device.platform, device.device_kind, os.environ.get("JSPEC_KERNELS")
    digest = hashlib.sha256(repr(names).encode() + content)
    return Path(folder) / f"{digest.hexdigest()}{_SUFFIX}"


@functools.cache
def _code() -> str | None:
    """Return a digest of the versions and the source code that programs are made from.

    Return None if there is no source code, or if a file has changed since this process began: the process may have
    imported the old version.
    """
    digest = hashlib.sha256(repr((jax.__version__, jaxlib_version, flax.__version__)).encode())
    began = psutil.Process().create_time()
    for folder in (Path(__file__).parents[1], Path(convert.__file__).parent):
        files = sorted(folder.rglob("*.py"))
        if not files or max(file.stat().st_mtime for file in files) > began:
            return None
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()


class _Unpickler(pickle.Unpickler):
    """An unpickler that records the packages whose classes and functions it finds by name."""

    def __init__(self, content: bytes):
        super().__init__(io.BytesIO(content))
        self.packages: set[str] = set()

    def find_class(self, module_name: str, global_name: str, /) -> object:
        self.packages.add(module_name.split(".")[0])
        return super().find_class(module_name, global_name)


def _pickled(value: object) -> bytes | None:
    """Return `value` in its pickled form; None if it cannot be pickled, or needs code that jspec does not know."""
    try:
        content = pickle.dumps(value)
        unpickler = _Unpickler(content)
        unpickler.load()
    except Exception as error:  # classes define how they are pickled
        _LOG.debug("A program is not stored: %s: %s", type(error).__name__, error)
        return None
    return content if unpickler.packages <= _PACKAGES else None


def _read(path: Path) -> _Stored | None:
    try:
        result, content = pickle.loads(path.read_bytes())
        stored = export.deserialize(bytearray(content)), result
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file can fail in any way; it is written again
        _LOG.warning("%s cannot be read and will be replaced: %s: %s", path, type(error).__name__, error)
        return None
    with contextlib.suppress(OSError):  # another user's file
        os.utime(path)
    return stored


def _write(path: Path, exported: export.Exported, result: Hashable) -> None:
    """Atomically write a program's file. Delete the oldest files if there are too many."""
    try:
        content = pickle.dumps((result, bytes(exported.serialize(vjp_order=0))))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=f"partial{_SUFFIX}.", dir=path.parent, delete=False) as partial:
            partial.write(content)
        Path(partial.name).replace(path)
    except OSError as error:
        _LOG.warning("%s cannot be written: %s", path, error)
    ages: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):  # another process may delete files, too
        ages = [(file.stat().st_mtime, file) for file in path.parent.glob(f"*{_SUFFIX}*")]
    for _, file in sorted(ages, reverse=True)[_MAX_FILES:]:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
