"""Connect processes, so that one program runs on the devices of all of them."""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from jspec.cluster.mesh.rendezvous import wait_for_all

# Set by a Kubernetes LeaderWorkerSet.
_LEADER, _SIZE, _INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"
_PORT = 8476  # that of JAX on Kubernetes and TPUs
_MESSAGE_BYTES = 1024
_SHUTDOWN_SECONDS = 30  # for a process that ends before the others


def join(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300,
) -> None:
    """Connect this process with others, so that `jax.devices()` lists the devices of all of them.

    Call it in every process, before anything else uses JAX. Every process must then make the same calls in the same
    order.

    Args:
        coordinator: the address of process 0, such as "10.0.0.1:1234". By default, the address and both numbers come
            from a Kubernetes LeaderWorkerSet. Under Slurm, Open MPI or on a TPU pod, JAX finds the processes
            (`jax.distributed.initialize`). It does not raise the errors below, but ends the process with its own.
        num_processes: the number of processes.
        process_id: the index of this process, from 0 to `num_processes` - 1.
        timeout: the number of seconds to wait for the other processes.

    Raises:
        TimeoutError: a process is missing, or process 0 cannot be reached.
        ValueError: only some of the arguments are given; the address is malformed; two processes have the same
            process_id; or the processes have different versions of jspec or JAX, or different `num_processes`.
        RuntimeError: this process has already joined.
        OSError: process 0 cannot listen at the port.
    """
    arguments = coordinator, num_processes, process_id
    if None in arguments and arguments != (None, None, None):
        raise ValueError(
            f"coordinator, num_processes and process_id are {coordinator!r}, {num_processes} and {process_id}; pass "
            "all three, or none."
        )
    if jax.distributed.is_initialized():
        raise RuntimeError("This process has joined others already; call join only once.")
    if coordinator is None and all(name in os.environ for name in (_LEADER, _SIZE, _INDEX)):
        coordinator = f"{os.environ[_LEADER]}:{_PORT}"
        num_processes, process_id = int(os.environ[_SIZE]), int(os.environ[_INDEX])
    if coordinator is not None and num_processes is not None and process_id is not None:
        versions = {package: version(package) for package in ("jspec", "jax", "jaxlib")}
        wait_for_all(coordinator, num_processes, process_id, timeout, versions)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        initialization_timeout=max(1, int(timeout)),
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )


def check_same(name: str, compute: Callable[[], str]) -> None:
    """Check that a value is the same in all processes. If it cannot be computed in one process, raise in all.

    Args:
        name: a noun phrase for the value, such as "version of jax", for the error message.
        compute: a function that returns the value, or raises ValueError or OSError.

    Raises:
        ValueError: the values differ, or `compute` raised an error in a process.
    """
    try:
        message = {"value": compute()}
    except (ValueError, OSError) as error:
        message = {"error": str(error)[: _MESSAGE_BYTES // 8]}  # a character may become six bytes
    own = np.frombuffer(json.dumps(message).encode().ljust(_MESSAGE_BYTES)[:_MESSAGE_BYTES], np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, _MESSAGE_BYTES)
    messages = [cast("dict[str, str]", json.loads(row.tobytes())) for row in rows]
    for i, other in enumerate(messages):
        if "error" in other:
            raise ValueError(f"Process {i} failed: {other['error']}")
    if differing := [i for i, other in enumerate(messages) if other != messages[0]]:
        raise ValueError(
            f"The {name} must be the same in all processes, but it differs from process 0 in: "
            f"{', '.join(map(str, differing))} (here, in process {jax.process_index()}, it is {message['value']}); use "
            "the same one everywhere."
        )
