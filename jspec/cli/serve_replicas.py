"""`jspec serve --replicas`: several replicas behind one server, with Ray Serve."""

import functools
import signal
import socket
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import typer

from jspec.cli.common import UsageError, status_line, wrong_options
from jspec.cli.engine_args import silent_engine
from jspec.cli.model_args import Precision, Sources
from jspec.cli.ray_cluster import ray_cluster

_APP = "jspec"  # the name of the Ray Serve application
_DRAIN = 600  # seconds for running requests after a signal, as in a server without replicas
_CHECK = 5  # seconds between two checks of the application
_MAX_FAILURES = 6  # failed checks in a row after which the command ends


def run_replicas(
    models: tuple[Sources, Precision],
    count: int,
    listener: socket.socket,
    keep_alive: int,
    name: str,
    server_options: Mapping[str, Any],
    engine_options: Mapping[str, Any],
) -> None:
    """Serve until SIGTERM or SIGINT arrives.

    Args:
        models: the models, and how to load them.
        count: the number of replicas.
        listener: a socket that holds the address until Ray Serve binds it.
        keep_alive: the number of seconds that a connection may be idle.
        name: the model name that clients use.
        server_options, engine_options: as in `jspec.cluster.app`.

    Raises:
        UsageError: Ray is not installed, the cluster does not have the resources, Ray Serve already runs there, or the
            application does not start.
    """
    model_sources, precision = models
    model_sources.tokenizer()  # raises for a wrong name or path now, not later in every replica
    make_engine = functools.partial(silent_engine, model_sources, precision, engine_options)
    host, port = listener.getsockname()[:2]
    with _cluster():
        from jspec import __version__
        from jspec.cluster.serve.app import ServiceSpec, default_resources

        slots = engine_options["slots"]
        with status_line() as set_status, wrong_options():
            spec = (make_engine, model_sources.tokenizer, name, slots, (count, count), default_resources())
            application = ServiceSpec(*spec, {"version": __version__, **server_options}).application()
            set_status("Loading the models and compiling in every replica (cached for the next run)")
            listener.close()
            _start(application, {"host": host, "port": port, "keep_alive_timeout_s": keep_alive})
        place, replicas = f"[{host}]" if ":" in host else host, "replica" if count == 1 else "replicas"
        typer.echo(f"Serving {name} at http://{place}:{port} with {count} {replicas}", err=True)
        _wait_for_signal()
        _drain()


@contextmanager
def _cluster() -> Generator[None]:
    """Connect to a Ray cluster, and shut Ray Serve down at the end.

    Raises:
        UsageError: Ray is not installed, or Ray Serve already runs on the cluster.
    """
    with ray_cluster("--replicas"):
        from ray import serve

        if serve.status().proxies:
            raise UsageError(
                "--replicas: Ray Serve already runs on the cluster of RAY_ADDRESS; deploy jspec.cluster.app there with "
                "ray.serve.run, or use another cluster."
            )
        try:
            yield
        finally:
            serve.shutdown()


def _start(application: Any, http_options: Mapping[str, Any]) -> None:
    """Start the application, and wait until it answers.

    Raises:
        UsageError: the application does not start.
    """
    from ray import serve

    try:
        serve.start(http_options=dict(http_options))
        serve.run(application, name=_APP, logging_config={"log_level": "WARNING"})
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--replicas: the replicas do not start: {reason}") from error


def _wait_for_signal() -> None:
    """Wait for SIGTERM or Ctrl-C. A second signal then ends the process at once.

    Raises:
        UsageError: Ray reports that the application has failed for good, or Ray no longer answers.
    """
    ended, failures = threading.Event(), 0

    def end(*_: object) -> None:
        ended.set()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    while not ended.wait(_CHECK):
        failures = 0 if _is_serving() else failures + 1
        if failures == _MAX_FAILURES:
            raise UsageError("--replicas: the Ray cluster or the application has ended; see Ray's logs.")


def _is_serving() -> bool:
    from ray import serve

    try:
        applications = serve.status().applications
    except Exception:  # the controller or the cluster is lost
        return False
    return _APP in applications and applications[_APP].status != "DEPLOY_FAILED"


def _drain() -> None:
    """Let running requests finish. The server rejects new ones."""
    from ray import serve

    cast(Any, serve.get_app_handle(_APP)).drain.remote(_DRAIN).result()
