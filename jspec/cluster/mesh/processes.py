"""Processes that join to run one program on the devices of all of them."""

import hashlib
import os
from importlib.metadata import version

import jax
import numpy as np
from jax.experimental import multihost_utils

from jspec.cluster.mesh.rendezvous import meet

_LEADER, _SIZE, _INDEX = "LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"  # of a LeaderWorkerSet
_PORT = 8476


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
        coordinator: the address of process 0, such as "10.0.0.1:1234". By default, it and the numbers come from the
            variables of a Kubernetes LeaderWorkerSet, or from those of Slurm, Open MPI or a TPU pod, as in
            `jax.distributed.initialize`.
        num_processes: the number of processes.
        process_id: the number of this process, from 0 to `num_processes` - 1.
        timeout: the number of seconds to wait for the other processes.

    Raises:
        TimeoutError: a process is missing, or process 0 cannot be reached.
        ValueError: only some of the arguments are given; the address is malformed; two processes have the same number;
            or the processes have different versions of jspec or JAX.
    """
    given = coordinator, num_processes, process_id
    if None in given and given != (None, None, None):
        raise ValueError("coordinator, num_processes and process_id belong together; pass all of them, or none.")
    if coordinator is None and _LEADER in os.environ:
        coordinator = f"{os.environ[_LEADER]}:{_PORT}"
        num_processes, process_id = int(os.environ[_SIZE]), int(os.environ[_INDEX])
    if coordinator is not None and num_processes is not None and process_id is not None:
        meet(coordinator, num_processes, process_id, timeout)
    jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=max(1, int(timeout)))
    for package in ("jspec", "jax", "jaxlib"):
        check_same(f"version of {package}", version(package))


def check_same(name: str, value: str) -> None:
    """Check that `value` is the same in all processes.

    Args:
        name: what the value is, for the error message.

    Raises:
        ValueError: the values differ.
    """
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1, len(digest))
    if others := [i for i, other in enumerate(digests) if not np.array_equal(other, digests[0])]:
        raise ValueError(
            f"Process {', '.join(map(str, others))} has another {name} than process 0 (here, in process "
            f"{jax.process_index()}, it is {value}); use the same everywhere."
        )
