# pyright: strict, reportUnknownMemberType=false
"""Exported programs on disk, so that a later process neither traces nor lowers them again.

JAX's persistent compilation cache stores compiled programs and finds them by their lowered form. Tracing and lowering
takes Python about a second per program, and an engine has some twenty programs. This module stores the lowered forms
(`jax.export`) in the directory of that cache. Like the compiled programs, they run unchecked.
"""

import functools
import hashlib
import io
import logging
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import flax
import jax
from jax import export
from jaxlib.version import __version__ as jaxlib_version

import convert

_LOG = logging.getLogger("jspec")
_SUFFIX = ".exported"
_MAX_FILES = 1000  # about 100 KB each; the oldest are deleted
# Packages whose code is part of the file's name. Code of other packages may change without notice.
_PACKAGES = {"jspec", "convert", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "builtins", "collections", "functools"}

# Other versions of JAX may not understand a Pallas kernel. They never read the file, whose name depends on the version.
_SAME_VERSION = [export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]


def through_cache(program: Callable[..., Any], arguments: tuple[Any, ...], *parts: Any) -> Callable[..., Any]:
    """Return a function that does the same as `program`, from the cache directory if it was stored there before.

    Return `program` itself if JAX has no local cache directory, if an argument is divided over devices, if a part is
    defined outside the packages that jspec knows, or if JAX cannot export the program.

    Args:
        program: a function of `arguments`. Everything that it depends on, except for jspec's own code, is in `parts`.
        arguments: pytrees of arrays, or of their shapes and dtypes.
        parts: hashable values, and pytree structures.
    """
    leaves, structure = cast(tuple[list[Any], Any], jax.tree.flatten(arguments))
    path = _path(leaves, structure, parts)
    if path is None:
        return program
    stored = _read(path)
    if stored is None:
        try:
            stored = _export(program, leaves, structure, _platform(leaves))
        except Exception as error:  # if the program itself is at fault, its caller sees the error when it lowers it
            _LOG.debug("A program cannot be exported: %s: %s", type(error).__name__, error)
            return program
        _write(path, *stored)
    exported, result = stored

    def call(*arguments: Any) -> Any:
        return jax.tree.unflatten(result, exported.call(*jax.tree.leaves(arguments)))

    return call


def _export(
    program: Callable[..., Any], leaves: list[Any], structure: Any, platform: str
) -> tuple[export.Exported, Any]:
    """Return `program` as an exported function of flat arguments, and the structure of its result."""
    results: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        values, result = cast(tuple[list[Any], Any], jax.tree.flatten(program(*jax.tree.unflatten(structure, leaves))))
        results.append(result)
        return values

    exported = export.export(jax.jit(flat), platforms=[platform], disabled_checks=_SAME_VERSION)(*leaves)
    return exported, results[-1]


def _device(leaves: list[Any]) -> Any:
    """Return the device of the first array, or else JAX's default device."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    return next(iter(cast(Iterable[Any], arrays[0].devices() if arrays else jax.devices())))


def _platform(leaves: list[Any]) -> str:
    """Return the name of a device's platform in `jax.export`, which is "cuda" for what JAX otherwise calls "gpu"."""
    platform: str = _device(leaves).platform
    return export.default_export_platform() if platform == jax.default_backend() else platform


def _path(leaves: list[Any], structure: Any, parts: tuple[Any, ...]) -> Path | None:
    """Return the file of a program, or None if it must not be stored."""
    config: Any = jax.config
    folder: str | None = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    if not folder or "://" in folder or any(len(leaf.devices()) > 1 for leaf in leaves if isinstance(leaf, jax.Array)):
        return None
    packages, content = _pickled((structure, parts))
    if content is None or not packages <= _PACKAGES:
        return None
    device = _device(leaves)
    types = [str(jax.typeof(leaf)) if isinstance(leaf, jax.Array) else f"{leaf.shape}{leaf.dtype}" for leaf in leaves]
    # Attributes of `jax.config` are this thread's values. A few settings have no attribute.
    settings = [(name, getattr(config, name, config.values[name])) for name in sorted(config.values)]
    settings = [(name, value) for name, value in settings if "cache" not in name]
    names = _code(), types, settings, device.platform, device.device_kind, os.environ.get("JSPEC_KERNELS")
    digest = hashlib.sha256(repr(names).encode() + content)
    return Path(folder) / f"{digest.hexdigest()}{_SUFFIX}"


@functools.cache
def _code() -> str:
    """Return a digest of the versions and the source code that programs are made from."""
    digest = hashlib.sha256(repr((jax.__version__, jaxlib_version, flax.__version__)).encode())
    for folder in (Path(__file__).parents[1], Path(convert.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class _Pickler(pickle.Pickler):
    """A pickler that records the packages whose classes and functions it pickles by name."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.packages: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, type | FunctionType | BuiltinFunctionType):
            self.packages.add((value.__module__ or "builtins").split(".")[0])


def _pickled(value: Any) -> tuple[set[str], bytes | None]:
    """Return the packages that `value` needs, and its pickled form, or None if it cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return set(), None
    return pickler.packages, file.getvalue()


def _read(path: Path) -> tuple[export.Exported, Any] | None:
    try:
        result, content = pickle.loads(path.read_bytes())
        path.touch()
        return export.deserialize(bytearray(content)), result
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged file can fail in any way; it is written again
        _LOG.warning("%s cannot be read and will be replaced: %s: %s", path, type(error).__name__, error)
        return None


def _write(path: Path, exported: export.Exported, result: Any) -> None:
    """Write a file that is complete whenever it exists. Delete the oldest files if there are too many."""
    try:
        content = pickle.dumps((result, bytes(exported.serialize(vjp_order=0))))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(path)
        files = sorted(path.parent.glob(f"*{_SUFFIX}"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[_MAX_FILES:]:
            file.unlink(missing_ok=True)
    except (OSError, pickle.PicklingError) as error:
        _LOG.warning("%s cannot be written: %s", path, error)
