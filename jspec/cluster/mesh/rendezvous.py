"""A meeting of all processes before JAX connects them.

JAX ends a process with a C++ stack trace if another one is late or cannot be reached. This meeting raises errors that
name the address and the missing processes.
"""

import json
import socket
import time
from contextlib import ExitStack

_PAUSE = 0.2  # seconds between two attempts to connect


def meet(address: str, num_processes: int, process_id: int, timeout: float) -> None:
    """Return when all processes have called this function.

    Args:
        address: the host and the port on which process 0 listens, such as "10.0.0.1:1234".
        timeout: the number of seconds after which to give up.

    Raises:
        ValueError: the address is malformed, or two processes have the same number.
        TimeoutError: a process is missing, or process 0 cannot be reached.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"The coordinator's address is {address!r}; expected a host and a port, as in 10.0.0.1:1234.")
    end = time.monotonic() + timeout
    if process_id == 0:
        _receive(int(port), num_processes, end, timeout)
    else:
        _report(host.strip("[]"), int(port), process_id, end, timeout)


def _receive(port: int, num_processes: int, end: float, timeout: float) -> None:
    """Wait for all other processes, and tell them the result."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", port), backlog=num_processes))
        present: list[int] = [0]
        connections: list[socket.socket] = []
        while len(present) < num_processes:
            listener.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(num_processes) if i not in present)
                raise TimeoutError(
                    f"{num_processes} processes should join at port {port}, but after {timeout:g} seconds process "
                    f"{missing} is missing; start it, or check that it can reach this machine."
                ) from None
            connection.settimeout(max(0.01, end - time.monotonic()))
            present.append(int(json.loads(connection.makefile().readline())))
            connections.append(connection)
        wrong = sorted({i for i in present if present.count(i) > 1 or not 0 <= i < num_processes})
        error = (
            f"Of {num_processes} processes, several have the number {wrong[0]}, or it is too large." if wrong else ""
        )
        for connection in connections:
            connection.sendall(f"{json.dumps(error)}\n".encode())
    if error:
        raise ValueError(error)


def _report(host: str, port: int, process_id: int, end: float, timeout: float) -> None:
    """Report this process to process 0, and wait for the result."""
    reason: Exception = TimeoutError("timed out")
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=left) as connection:
                connection.sendall(f"{process_id}\n".encode())
                answer = connection.makefile().readline()
        except OSError as error:
            reason = error
            time.sleep(_PAUSE)
            continue
        if error := json.loads(answer or '"Process 0 ended while other processes were joining; see its error."'):
            raise ValueError(error)
        return
    raise TimeoutError(
        f"Process {process_id} cannot reach process 0 at {host}:{port} within {timeout:g} seconds ({reason}); start "
        "process 0, or check the address and the firewall."
    )
