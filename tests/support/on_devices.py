"""A script in a process of its own with a given number of devices, because JAX counts devices only once."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def output(count, module, *options):
    """Return the lines that a module of `support` prints with `count` devices and `options`."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-m", f"support.{module}", *map(str, options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
