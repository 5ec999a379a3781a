"""`jspec serve`: serve a model to OpenAI API clients."""

import os
import socket
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from jspec.cli import options as o
from jspec.cli.common import UsageError, option, status_line, wrong_options
from jspec.cli.engine_args import compile_all, engine_of
from jspec.cli.model_args import sources

_SOON = 10  # seconds for the engine to stop
EPILOG = """\b
Routes: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics,
/version, and / for a browser.

\b
SIGTERM ends the server when all requests that it has accepted are answered;
meanwhile new ones get the status 503. Ctrl-C ends it at once.

\b
Without --api-key, other names than its own and pages of other sites get
the status 403, unless --allow-host or --allow-origin names them.
"""


_MaxLength = Annotated[
    int | None,
    option(
        "--max-length",
        "N",
        "Longest text, prompt included; every slot has room for that.",
        min=2,
        show_default="1024, or what the models know",
    ),
]
_Hosts = Annotated[
    list[str] | None,
    option(
        "--allow-host", "NAME", "Another name of this server; may be given again. * allows any.", show_default=False
    ),
]
_Origins = Annotated[
    list[str] | None,
    option(
        "--allow-origin",
        "ORIGIN",
        "Pages that may use it, as https://a.org; may be given again. * for all.",
        show_default=False,
    ),
]


def serve(
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Path, name or hub id [default: bundled one].")
    ] = None,
    tokenizer_source: o.Tokenizer = None,
    draft: o.Draft = None,
    plain: o.Plain = False,
    num_draft_tokens: Annotated[
        Any,
        option(
            "--num-draft-tokens",
            "N",
            "Tokens guessed a round; auto: as many as pay, by how much there is to do.",
            parser=o.length,
            show_default="auto",
        ),
    ] = None,
    dtype: o.Dtype = None,
    quantize: o.Quantize = None,
    accept: Annotated[
        Any, o.choice("--accept", "Rule for requests without a seed.", "rejection", "block", "coupled")
    ] = "rejection",
    slots: Annotated[int, option("--slots", "N", "Requests at once; others wait.", min=1)] = 8,
    max_length: _MaxLength = None,
    max_waiting: Annotated[
        int, option("--max-waiting", "N", "Requests that may wait; more get the status 429.", min=1)
    ] = 64,
    host: Annotated[str, option("--host", "ADDRESS", "Where to listen; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, option("--port", "N", "The same; 0 for any that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, option("--api-key", "KEY", "What clients must know [default: JSPEC_API_KEY].")
    ] = None,
    name: Annotated[str | None, option("--name", "NAME", "What clients call the model [default: TARGET].")] = None,
    allow_host: _Hosts = None,
    allow_origin: _Origins = None,
    keep_alive: Annotated[int, option("--keep-alive", "SECONDS", "How long a connection may be idle.", min=1)] = 75,
    metrics_prefix: Annotated[str, option("--metrics-prefix", "TEXT", "Before the names of metrics.")] = "jspec_",
) -> None:
    """Answer clients of OpenAI's API over HTTP.

    A request with a seed gets the same text as jspec.generate returns for it, regardless of other requests.
    """
    api_key = os.environ.get("JSPEC_API_KEY") if api_key is None else api_key
    _check(api_key, metrics_prefix)
    access = _access(host, allow_host, allow_origin)
    where = sources(target, draft, plain, tokenizer_source)
    if num_draft_tokens is not None and not where.drafts:
        raise UsageError("--plain (or --draft none) decodes without a draft; leave out --num-draft-tokens.")
    engine_options = {"slots": slots, "accept": accept, "max_waiting": slots + max_waiting}
    with _listener(host, port) as listener:
        with status_line() as set_status:
            draft_length = "auto" if num_draft_tokens is None else num_draft_tokens
            engine, tokenizer = engine_of(
                where, set_status, dtype, quantize, lambda _: draft_length, max_length, **engine_options
            )
            compile_all(engine, set_status)
        server_options = {
            "max_waiting": max_waiting,
            "api_key": api_key,
            "metrics_prefix": metrics_prefix,
            "access": access,
        }
        _run(engine, tokenizer, listener, keep_alive, name or target or "bundled", **server_options)


def _check(api_key: str | None, metrics_prefix: str) -> None:
    """Check the options that typer cannot check."""
    needed = ("starlette", "uvicorn", "sse_starlette", "pydantic", "prometheus_client", "llguidance")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UsageError(
            f"jspec serve needs {', '.join(missing)}; install jspec's extra for it, in its clone by "
            'pip install -e ".[serve]".'
        )
    if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key):
        raise UsageError("--api-key must be of visible ASCII characters, for it is sent in a header.")
    if not (metrics_prefix.isascii() and f"{metrics_prefix}x".replace(":", "_").isidentifier()):
        raise UsageError(
            f"--metrics-prefix {metrics_prefix!r} cannot begin a name in Prometheus; use letters, "
            "digits, _ and :, not a digit first."
        )


def _access(host: str, hosts: list[str] | None, origins: list[str] | None) -> Any:
    from jspec.serve.access import Access

    with wrong_options():
        return Access(host, tuple(hosts or ()), tuple(origins or ()))


def _listener(host: str, port: int) -> socket.socket:
    from jspec.serve.run import bound

    if not host.strip():
        raise UsageError("--host is empty; give an address, such as 127.0.0.1, or 0.0.0.0 for all of this machine.")
    try:
        return bound(host, port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "is no address"
        raise UsageError(f"--host {host} --port {port} cannot be listened on: {reason}; choose another.") from error


def _run(
    engine: Any, tokenizer: Any, listener: socket.socket, keep_alive: int, name: str, **server_options: Any
) -> None:
    from jspec import __version__
    from jspec.models.sampling_defaults import described
    from jspec.serve.app import Server
    from jspec.serve.run import ends_within, run

    with engine:
        server = Server(engine, tokenizer, name, version=__version__, **server_options)
        server.warm_up()
        listener.listen(2048)
        host, port = listener.getsockname()[:2]
        place = f"[{host}]" if ":" in host else host
        if defaults := described(engine.device.target):
            typer.echo(f"{defaults}; a request may set each field.", err=True)
        typer.echo(f"Serving {name} at http://{place}:{port}", err=True)
        try:
            run(server, listener, keep_alive)
        finally:
            with ends_within(_SOON):
                server.close()
        with ends_within(_SOON):  # the server has given up unanswered requests
            engine.close(cancel=True)
