"""A rendezvous of all processes before JAX connects them.

JAX ends a process with a C++ stack trace if another process is late or cannot be reached. The rendezvous raises errors
that name the address and the missing processes. It also compares the processes' versions.
"""

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

_PAUSE = 0.2  # seconds between two attempts to connect
_PATIENCE = 5.0  # seconds for another process to send its line; anything else that connects is ignored
_LONGEST_LINE = 4096


def wait_for_all(
    address: str, num_processes: int, process_id: int, timeout: float, versions: Mapping[str, str]
) -> None:
    """Return when all processes have called this function.

    Args:
        address: the host and the port on which process 0 listens, such as "10.0.0.1:1234".
        timeout: the number of seconds after which to give up.
        versions: names and values that must be the same in all processes.

    Raises:
        ValueError: an argument is malformed, or the processes are incompatible.
        TimeoutError: a process is missing, or process 0 cannot be reached.
        OSError: process 0 cannot listen at the port.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"The coordinator's address is {address!r}; expected a host and a port, as in 10.0.0.1:1234.")
    if not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id is {process_id}; expected a number from 0 to {num_processes - 1}, because num_processes is "
            f"{num_processes}."
        )
    own = {"process_id": process_id, "num_processes": num_processes, "versions": {**versions}}
    place = host.strip("[]"), int(port)
    error = _receive(place[1], own, timeout) if process_id == 0 else _report(place, own, timeout)
    if error is not None:
        raise error


def _receive(port: int, own: Mapping[str, Any], timeout: float) -> Exception | None:
    """Wait for all other processes, send each the result, and return it: an error or None."""
    peers: dict[int, socket.socket] = {}
    connections: list[socket.socket] = []
    deadline = time.monotonic() + timeout
    error: Exception | None = None
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(port))
        while error is None and len(peers) < own["num_processes"] - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                missing = ", ".join(str(i) for i in range(1, own["num_processes"]) if i not in peers)
                error = TimeoutError(
                    f"Only {len(peers) + 1} of {own['num_processes']} processes joined at port {port} within "
                    f"{timeout:g} seconds (missing: {missing}); start the others, or check that they can reach this "
                    "machine."
                )
                break
            connection.settimeout(_PATIENCE)
            if (line := _read(connection)) is not None and isinstance(number := line.get("process_id"), int):
                if difference := _difference(own, line, peers):
                    error = ValueError(difference)
                connections.append(connection)
                peers[number] = connection
                peers = {i: peer for i, peer in peers.items() if not _has_ended(peer)}
        answer = {"error": "" if error is None else str(error), "is_late": isinstance(error, TimeoutError)}
        for connection in connections:
            with contextlib.suppress(OSError):  # the process has ended
                connection.sendall(f"{json.dumps(answer)}\n".encode())
    return error


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=1024
        )
    except OSError as error:
        raise OSError(f"Process 0 cannot listen at port {port} ({error.strerror}); choose another port.") from error


def _difference(own: Mapping[str, Any], line: Mapping[str, Any], peers: Mapping[int, socket.socket]) -> str:
    """Return why a process cannot join process 0, or ""."""
    number = line["process_id"]
    pairs = {"num_processes": (line.get("num_processes"), own["num_processes"])}
    versions = cast(Mapping[str, str], line.get("versions") or {})
    pairs |= {f"the version of {name}": (versions.get(name), value) for name, value in own["versions"].items()}
    for name, (found, expected) in pairs.items():
        if found != expected:
            return f"In process {number}, {name} is {found} instead of {expected}; use the same in all processes."
    if number in peers and not _has_ended(peers[number]):
        return f"Several processes have process_id {number}; give each its own, from 0 to {own['num_processes'] - 1}."
    return ""


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the process at the other end has closed the connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _report(place: tuple[str, int], own: Mapping[str, Any], timeout: float) -> Exception | None:
    """Report this process to process 0, and return the result: an error or None."""
    deadline = time.monotonic() + timeout
    reason, was_reached = "timed out", False
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(place, timeout=min(remaining, 2 * _PATIENCE)) as connection:
                connection.sendall(f"{json.dumps(own)}\n".encode())
                connection.settimeout(max(0.01, deadline + _PAUSE - time.monotonic()))
                answer = _read(connection)
            if answer is not None and isinstance(message := answer.get("error"), str):
                return (TimeoutError if answer.get("is_late") else ValueError)(message) if message else None
            was_reached, reason = True, "it closed the connection, or another program listens there"
        except OSError as error:
            reason = str(error)
        time.sleep(_PAUSE)
    verb = "got no answer from" if was_reached else "could not reach"
    return TimeoutError(
        f"Process {own['process_id']} {verb} process 0 at {place[0]}:{place[1]} within {timeout:g} "
        f"seconds ({reason}); start process 0, or check the address and the firewall."
    )


def _read(connection: socket.socket) -> dict[str, Any] | None:
    """Return the JSON object that the other process sends, or None if it sends anything else, or nothing."""
    try:
        with connection.makefile("rb") as stream:
            found: object = json.loads(stream.readline(_LONGEST_LINE))
    except (OSError, ValueError):
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None
