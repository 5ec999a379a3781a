"""A drill step in its own process: ``python -m bench.gpu.step MODULE FILE [--rehearse]``."""

import argparse
import ctypes
import importlib
import signal
import sys
from pathlib import Path

from bench.gpu.record import Record

_PR_SET_PDEATHSIG = 1  # an option of prctl(2)


def run(module: str, file: Path, rehearse: bool) -> bool:
    """Write the measurements of ``module.run`` to `file`, and return whether it finished.

    An exception, including one raised while importing the module, becomes the last row.
    """
    record = Record(file, module=module, rehearsal=rehearse)
    try:
        from bench.conditions import conditions  # this starts JAX, which may fail

        record.facts["conditions"] = conditions() | {"command": f"python -m bench.gpu.step {module} {file.name}"}
        importlib.import_module(module).run(record, rehearse)
    except BaseException as error:  # including a library's SystemExit
        record.fail(module, error)
        record.finish("failed")
        return False
    record.finish("done")
    return True


def _end_with_the_driver() -> None:
    """Make the operating system kill this process when its parent dies, so that no process keeps holding the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    _end_with_the_driver()
    raise SystemExit(not run(given.module, given.file, given.rehearse))
