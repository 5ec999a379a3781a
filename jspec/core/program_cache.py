"""The folder in which the commands and replicas keep compiled programs."""

import os
import sys
from contextlib import suppress
from pathlib import Path

CACHE_BYTES = 4 * 2**30  # the maximum size of the folder


def prepare_environment() -> None:
    """Cache compiled programs in a folder of bounded size, and silence an XLA log message.

    Call this function before anything is compiled. If `JAX_COMPILATION_CACHE_DIR` is set, JAX's cache
    settings do not change.
    """
    # For every cached program, XLA reports its own stored tuning hints as errors in the log
    # ("+prefer-no-gather is not supported on the host machine", openxla/xla issue 44565). Real errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # cached programs run unchecked, so no other user may write here
    except OSError:
        return  # the home folder is not writable, so programs compile every time
    _add_times_of_use(folder)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_compilation_cache_max_size": CACHE_BYTES,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)
            if "jax" in sys.modules:  # jax reads its environment only on import
                sys.modules["jax"].config.update(name, value)


def _add_times_of_use(folder: Path) -> None:
    """Create the file in which JAX records a cached program's last use, for every program that lacks it.

    JAX evicts the least recently used programs. If such a file is missing, for example because a process was killed
    between two writes, JAX stops writing to the folder.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(f"{program.name.removesuffix('-cache')}-atime")
        with suppress(OSError):  # another process may remove the program meanwhile
            if not used.exists():
                used.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
