"""Compilation and registration of the native kernels. Without a compiler, programs use XLA's operations instead."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import jax
import jaxlib.version

_LOG = logging.getLogger("jspec")
_SOURCES = Path(__file__).parent
_LOCK = threading.Lock()
_COMPILERS = ("g++", "clang++", "c++")
# Without contraction, the compiler fuses no operations, so rounding does not depend on the number of rows.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC", "-w")
_SECONDS = 300  # a compilation takes a few seconds
_DIGEST_BYTES = hashlib.sha256().digest_size


class Kernel(ABC):
    """A native kernel, compiled from one source file in this folder.

    Attributes:
        source: the file's name without its suffix. The file defines a handler of the same name.
    """

    source: ClassVar[str]

    @property
    @abstractmethod
    def variant(self) -> str:
        """The variant of the kernel, which is part of file names and of `target`."""

    @property
    def macros(self) -> dict[str, object]:
        """The macros that the source file expects, and their values."""
        return {}

    @property
    def is_faster(self) -> bool:
        """Whether the kernel is faster than XLA's operations on this CPU."""
        return True

    @property
    def target(self) -> str:
        """The name that compiled programs use for the kernel. The name changes with the kernel's source code."""
        return f"jspec_{self.source}_{self.variant}_{_digest(self.source)[:8]}"


class Float32Kernel(Kernel):
    """A kernel for float32 arrays, which is faster than XLA only with AVX-512."""

    @property
    def variant(self) -> str:
        return "float32"

    @property
    def is_faster(self) -> bool:
        return has_avx512()


def is_default() -> bool:
    """Return whether matrices are packed by default on this CPU: it has AVX-512 VNNI, and ``JSPEC_NATIVE`` is not 0.

    With AVX2 alone, the kernels are slower than XLA's products for several rows.
    """
    return os.environ.get("JSPEC_NATIVE") != "0" and "avx512_vnni" in _cpu().split()


def has_avx512() -> bool:
    """Return whether this CPU has AVX-512."""
    return "avx512f" in _cpu().split()


def register(kernel: Kernel) -> bool:
    """Compile the kernel if necessary, and register it with XLA.

    Returns:
        Whether the kernel is available. If not, a warning states why, once for each reason, unless ``JSPEC_NATIVE=0``
        is set or XLA is faster.
    """
    with _LOCK:  # XLA rejects a second registration, and an engine compiles its programs on several threads
        return _register(kernel)


@functools.cache
def _register(kernel: Kernel) -> bool:
    if os.environ.get("JSPEC_NATIVE") == "0" or not kernel.is_faster:
        return False
    try:
        loaded = ctypes.CDLL(str(library(kernel)))
    except (OSError, subprocess.SubprocessError) as error:
        _warn_once(str(error))
        return False
    handler = jax.ffi.pycapsule(getattr(loaded, kernel.source))
    jax.ffi.register_ffi_target(kernel.target, handler, platform="cpu")
    return True


@functools.cache
def _warn_once(reason: str) -> None:
    _LOG.warning("Native kernels are not available, so XLA's slower operations are used: %s", reason)


def library(kernel: Kernel) -> Path:
    """Return the path of the compiled kernel. Compile it first if the file is missing or damaged.

    Raises:
        OSError: there is no compiler, or the library cannot be written.
        subprocess.SubprocessError: the compiler failed. The message ends with the last line of its output.
    """
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler was found; install g++ or clang++, or set CXX.")
    parts = (_digest(kernel.source), jaxlib.version.__version__, compiler, _FLAGS, _cpu())
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    path = _folder() / f"{kernel.source}-{kernel.variant}-{name}.so"
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
        source = _SOURCES / f"{kernel.source}.cc"
        defined = [f"-D{macro}={value}" for macro, value in kernel.macros.items()]
        command = [compiler, *_FLAGS, *defined, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(output)]
        _LOG.info("Compiling the kernel %s_%s for this CPU.", kernel.source, kernel.variant)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise subprocess.SubprocessError(f"{compiler} took more than {_SECONDS} seconds.") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise subprocess.SubprocessError(f"{compiler} could not compile {source.name} ({last}).")
        with output.open("ab") as stream:
            stream.write(hashlib.sha256(output.read_bytes()).digest())
        os.replace(output, path)  # atomically, because other processes may compile the same kernel


def _compiler() -> str | None:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else _COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jspec" / "native"


@functools.cache
def _digest(source: str) -> str:
    """Return a digest of a source file and all headers."""
    files = (_SOURCES / f"{source}.cc", *sorted(_SOURCES.glob("*.h")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@functools.cache
def _cpu() -> str:
    """Return the CPU's instruction sets, because the compiled code may use all of them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), platform.machine())
