"""The commands, and the reporting of their errors."""

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from convert.__main__ import convert
from jspec import __version__
from jspec.cli import batch, chat, generate, index, interrupts, models, plan, serve, train, tune
from jspec.cli.common import UsageError
from jspec.core.program_cache import prepare_environment

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=generate.EPILOG, short_help="Continue prompts.")(generate.generate)
app.command(short_help="Talk with a model.")(chat.chat)
app.command(epilog=batch.EPILOG, short_help="Complete all prompts of a file.")(batch.batch)
app.command(epilog=serve.EPILOG, short_help="Serve a model to clients of OpenAI's API.")(serve.serve)
app.command(short_help="Measure how many tokens to draft on this device.")(tune.tune)
app.command(short_help="Train a drafter for a target.")(train.train)
app.command(short_help="Predict memory and speed on a device, even one that you do not have.")(plan.plan)
app.command(short_help="Build a datastore of text to draft from.")(index.index)
app.command(short_help="List the models that have short names.")(models.models)
app.command(short_help="Convert checkpoints from Hugging Face to Orbax and back.")(convert)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit, with one sentence on stderr if it fails."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not support all characters
    error = code = None
    try:
        code = app(arguments, prog_name="jspec", standalone_mode=False)
    except Exception as failure:
        error = failure
    with interrupts.ending:
        if error:
            code, message = _explained(error, _command(sys.argv[1:] if arguments is None else arguments))
            print(f"jspec: {message}", file=sys.stderr)
        sys.exit(code)


def _command(arguments: Sequence[str]) -> str:
    """Return the command whose --help an error message suggests."""
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    return " ".join(["jspec", *known.intersection(arguments[:1])])


def _explained(error: Exception, command: str) -> tuple[int, str]:
    """Return the exit code and a one-line message for an error that the user can fix. Re-raise all other errors."""
    if message := getattr(error, "format_message", None):  # the command line parser's own errors
        return 2, f"{message()} (see {command} --help)"
    if isinstance(error, UsageError):
        return 2, f"{error} (see {command} --help)"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return 1, f"{error.filename}: {error.strerror}."
    if isinstance(error, ValueError | OSError):
        return 1, " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in str(error):
        return 1, "out of memory; use smaller models, fewer or shorter prompts, or a smaller --max-new-tokens."
    raise error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jspec {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding of Llama-family models in JAX."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        prepare_environment()
