"""Compilation and registration of the native kernels. Without a compiler, programs use XLA's product instead."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
from jax import Array

_LOG = logging.getLogger("jspec")
_SOURCE = Path(__file__).with_name("products.cc")
_COMPILERS = ("g++", "clang++", "c++")
# Without contraction, the compiler fuses no operations, so rounding does not depend on the number of rows.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")
_SECONDS = 300  # a compilation takes a few seconds
_DIGEST_BYTES = hashlib.sha256().digest_size


class Kernel(NamedTuple):
    """A native kernel that multiplies by matrices of one format.

    Attributes:
        format: a key of `convert.blocks.FORMATS`.
        activation_bits: 8, 16 or 24. See `jspec.models.packed`.
    """

    format: str
    activation_bits: int

    @property
    def target(self) -> str:
        """The name that compiled programs use for the kernel. The name changes with the kernel's source code."""
        return f"jspec_product_{self.format}_{self.activation_bits}_{_digest()[:8]}"


def multiply(kernel: Kernel, x: Array, tiles: Array, out_size: int) -> Array:
    """Return the product ``float32[M, out]`` of ``x``, ``float32[M, in]``, and `tiles`. For CPU programs only."""
    result = jax.ShapeDtypeStruct((x.shape[0], out_size), jnp.float32)
    return jax.ffi.ffi_call(kernel.target, result)(x, tiles)


def is_default() -> bool:
    """Return whether matrices are packed by default on this CPU: it has AVX-512 VNNI, and ``JSPEC_NATIVE`` is not 0.

    With AVX2 alone, the kernels are slower than XLA's products for several rows.
    """
    return os.environ.get("JSPEC_NATIVE") != "0" and "avx512_vnni" in _cpu().split()


@functools.cache
def register(kernel: Kernel) -> bool:
    """Compile the kernel if necessary, and register it with XLA.

    Returns:
        Whether the kernel is available. If not, a single warning states why, unless ``JSPEC_NATIVE=0`` is set.
    """
    if os.environ.get("JSPEC_NATIVE") == "0":
        return False
    try:
        loaded = ctypes.CDLL(str(library(kernel)))
    except (OSError, subprocess.SubprocessError) as error:
        _warn_once(str(error))
        return False
    jax.ffi.register_ffi_target(kernel.target, jax.ffi.pycapsule(loaded.product), platform="cpu")
    return True


@functools.cache
def _warn_once(reason: str) -> None:
    _LOG.warning("Weights are widened, which is slower than reading them as they are stored: %s", reason)


def library(kernel: Kernel) -> Path:
    """Return the path of the compiled kernel. Compile it first if the file is missing or damaged.

    Raises:
        OSError: there is no compiler, or the library cannot be written.
        subprocess.SubprocessError: the compiler failed. The message ends with the last line of its output.
    """
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++ or clang++, or set CXX.")
    parts = (_digest(), jaxlib.version.__version__, compiler, _FLAGS, _cpu())
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    path = _folder() / f"{kernel.format}-{kernel.activation_bits}-{name}.so"
    if not _is_whole(path):
        _compile(compiler, kernel, path)
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a library is complete and undamaged, that is, ends with the digest of all bytes before it."""
    content = path.read_bytes() if path.exists() else b""
    return content[-_DIGEST_BYTES:] == hashlib.sha256(content[:-_DIGEST_BYTES]).digest()


def _compile(compiler: str, kernel: Kernel, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        defined = f"-DFORMAT={kernel.format}", f"-DPLANES={kernel.activation_bits // 8}"
        include = f"-I{jax.ffi.include_dir()}"
        command = [compiler, *_FLAGS, *defined, include, str(_SOURCE), "-o", str(output)]
        _LOG.info("Compiling the kernel for %s weights on this CPU.", kernel.format)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise subprocess.SubprocessError(f"{compiler} took more than {_SECONDS} seconds.") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise subprocess.SubprocessError(f"{compiler} could not compile {_SOURCE.name} ({last}).")
        with output.open("ab") as stream:
            stream.write(hashlib.sha256(output.read_bytes()).digest())
        os.replace(output, path)  # atomically, because other processes may compile the same kernel


def _compiler() -> str | None:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jspec" / "native"


@functools.cache
def _digest() -> str:
    files = (_SOURCE, *sorted(_SOURCE.parent.glob("*.h")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _cpu() -> str:
    """Return the CPU's instruction sets, because the compiled code may use all of them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), platform.machine())
