"""`jspec serve`: serve a model to OpenAI API clients."""

import os
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jspec.cli import options as o
from jspec.cli.common import UsageError, option, status_line, wrong_options
from jspec.cli.engine_args import compile_all, engine_draft_length, engine_of
from jspec.cli.model_args import sources

if TYPE_CHECKING:
    from jspec.core.tokenizer import Tokenizer
    from jspec.engine import Engine
    from jspec.serve.access import Access

_SOON = 10  # seconds for the engine to stop
EPILOG = """\b
Routes: /v1/completions, /v1/chat/completions, /v1/responses, /v1/models,
/tokenize, /detokenize, /health, /metrics, /version, and / for a browser.

\b
SIGTERM ends the server after it has answered all accepted requests; until
then, new requests get status 503. Ctrl-C ends it at once.

\b
Without --api-key, requests to other host names and from pages of other sites
get status 403, unless --allow-host or --allow-origin allows them.
"""


_MaxLength = Annotated[
    int | None,
    option(
        "--max-length",
        "N",
        "Longest sequence in tokens, prompt included; every slot reserves memory for it.",
        min=2,
        show_default="the models' limit, up to 8192, or less if memory is short",
    ),
]
_Hosts = Annotated[
    list[str] | None,
    option(
        "--allow-host",
        "NAME",
        "Another host name of this server; may be repeated. * allows any name.",
        show_default=False,
    ),
]
_Origins = Annotated[
    list[str] | None,
    option(
        "--allow-origin",
        "ORIGIN",
        "Origin whose pages may use the server, such as https://a.org; may be repeated. * allows any origin.",
        show_default=False,
    ),
]
_Slots = Annotated[
    int, option("--slots", "N", "Requests that each replica runs at once; further requests wait.", min=1)
]
_Host = Annotated[
    str, option("--host", "ADDRESS", "Address to listen on; 0.0.0.0 accepts connections from other machines.")
]
_ApiKey = Annotated[str | None, option("--api-key", "KEY", "Key that clients must send [default: JSPEC_API_KEY].")]
_Replicas = Annotated[
    int | None,
    option(
        "--replicas",
        "N",
        "Number of replicas, which are processes that Ray starts; if one fails, the others continue its requests.",
        min=1,
        show_default="decode in this process",
    ),
]


def serve(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Path, model name, Hugging Face repo id or org/repo:file.gguf [default: the bundled target].",
        ),
    ] = None,
    tokenizer_source: o.Tokenizer = None,
    draft: o.Draft = None,
    plain: o.Plain = False,
    num_draft_tokens: o.AutoDraftTokens = None,
    dtype: o.Dtype = None,
    quantize: o.Quantize = None,
    draft_quantize: o.DraftQuantize = None,
    activation_bits: o.ActivationBits = "24",
    accept: Annotated[
        str, o.choice("--accept", "Acceptance rule for requests without a seed.", "rejection", "block", "coupled")
    ] = "rejection",
    replicas: _Replicas = None,
    slots: _Slots = 8,
    max_length: _MaxLength = None,
    max_waiting: Annotated[
        int, option("--max-waiting", "N", "Requests that may wait; further requests get status 429.", min=1)
    ] = 64,
    host: _Host = "127.0.0.1",
    port: Annotated[int, option("--port", "N", "Port to listen on; 0 chooses a free one.", min=0, max=65535)] = 8000,
    api_key: _ApiKey = None,
    name: Annotated[str | None, option("--name", "NAME", "Model name that clients see [default: TARGET].")] = None,
    allow_host: _Hosts = None,
    allow_origin: _Origins = None,
    keep_alive: Annotated[int, option("--keep-alive", "SECONDS", "How long a connection may be idle.", min=1)] = 75,
    metrics_prefix: Annotated[str, option("--metrics-prefix", "TEXT", "Prefix of metric names.")] = "jspec_",
) -> None:
    """Answer clients of OpenAI's API over HTTP.

    A request with a seed always gets the same text: the tokens that jspec.generate samples with that seed's key,
    whatever else the server is running.
    """
    api_key = os.environ.get("JSPEC_API_KEY") if api_key is None else api_key
    _check(api_key, metrics_prefix)
    access = _access(host, allow_host, allow_origin)
    where = sources(target, draft, plain, tokenizer_source)
    draft_length, length = engine_draft_length(where, num_draft_tokens), max_length or "auto"
    precision = where.precision(dtype, quantize, draft_quantize, activation_bits)
    engine_options: dict[str, Any] = {"slots": slots, "accept": accept}
    server_options = {
        "max_waiting": max_waiting,
        "api_key": api_key,
        "metrics_prefix": metrics_prefix,
        "access": access,
    }
    name = name or target or "bundled"
    with _listener(host, port) as listener:
        if replicas is not None:
            from jspec.cli.serve_replicas import run_replicas

            engine_options |= {"num_draft_tokens": draft_length, "max_length": length}
            models = where, precision
            return run_replicas(models, replicas, listener, keep_alive, name, server_options, engine_options)
        engine_options |= {"max_waiting": slots + max_waiting}
        with status_line() as set_status:
            engine, tokenizer = engine_of(
                where, set_status, precision, lambda _: draft_length, length, **engine_options
            )
            compile_all(engine, set_status)
        _run(engine, tokenizer, listener, keep_alive, name, **server_options)


def _check(api_key: str | None, metrics_prefix: str) -> None:
    """Check the options that typer cannot check."""
    needed = ("starlette", "uvicorn", "sse_starlette", "pydantic", "prometheus_client", "llguidance")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise UsageError(
            f"jspec serve needs {', '.join(missing)}; install jspec's serve extra by running "
            'pip install -e ".[serve]" in its clone.'
        )
    if api_key is not None and (not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key):
        raise UsageError("--api-key must consist of visible ASCII characters, because it is sent in a header.")
    if not (metrics_prefix.isascii() and f"{metrics_prefix}x".replace(":", "_").isidentifier()):
        raise UsageError(
            f"--metrics-prefix {metrics_prefix!r} cannot start a name in Prometheus; use letters, "
            "digits, _ and :, and no digit first."
        )


def _access(host: str, hosts: list[str] | None, origins: list[str] | None) -> "Access":
    from jspec.serve.access import Access

    with wrong_options():
        return Access(host, tuple(hosts or ()), tuple(origins or ()))


def _listener(host: str, port: int) -> socket.socket:
    from jspec.serve.run import bound

    if not host.strip():
        raise UsageError(
            "--host is empty; pass an address, such as 127.0.0.1, or 0.0.0.0 for all addresses of this machine."
        )
    try:
        return bound(host, port)
    except (OSError, UnicodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not an address"
        raise UsageError(
            f"cannot listen on --host {host} --port {port}: {reason}; choose another address or port."
        ) from error


def _capacity(engine: "Engine") -> str:
    """Return a line with the number and the length of the sequences that the engine's slots hold."""
    from jspec.engine.memory_budget import slots_bytes

    device = engine.device
    size = slots_bytes(device.target, device.drafter, device.sizes)
    sequences = "1 sequence" if device.sizes.slots == 1 else f"{device.sizes.slots:,} sequences"
    return f"Capacity: {sequences} of {device.sizes.length:,} tokens ({size / 1e9:,.1f} GB)"


def _run(
    engine: "Engine", tokenizer: "Tokenizer", listener: socket.socket, keep_alive: int, name: str, **server_options: Any
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
        if defaults := described(engine.target):
            typer.echo(f"{defaults}; a request can override each field.", err=True)
        if note := server.tools_note:
            typer.echo(note, err=True)
        typer.echo(_capacity(engine), err=True)
        typer.echo(f"Serving {name} at http://{place}:{port}", err=True)
        try:
            run(server, listener, keep_alive)
        finally:
            with ends_within(_SOON):
                server.close()
        with ends_within(_SOON):  # the server has already abandoned unanswered requests
            engine.close(cancel=True)
