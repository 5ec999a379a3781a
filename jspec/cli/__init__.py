"""The `jspec` command. Nothing slow is imported until a command runs, so that help comes at once."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from jspec import __version__
from jspec.cli import generate, index, tune
from jspec.cli.shared import UsageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(epilog=generate.EPILOG, short_help="Continue prompts.")(generate.generate)
app.command(short_help="Measure how far to draft on this device.")(tune.tune)
app.command(short_help="Make a datastore of texts, to draft from.")(index.index)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong usage. A failure is one sentence on stderr."""
    try:
        code = app(arguments, prog_name="jspec", standalone_mode=False)
    except Exception as error:
        code, message = _explained(error, _command(sys.argv[1:] if arguments is None else arguments))
        print(f"jspec: {message}", file=sys.stderr)
    sys.exit(code)


def _command(arguments: Sequence[str]) -> str:
    """What to ask for help."""
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    return " ".join(["jspec", *known.intersection(arguments[:1])])


def _explained(error: Exception, command: str) -> tuple[int, str]:
    """Exit code and one line for what a person can mend; anything else is a bug and keeps its traceback."""
    if message := getattr(error, "format_message", None):  # the command line parser's own errors
        return 2, f"{message()} (see {command} --help)"
    if isinstance(error, UsageError):
        return 2, f"{error} (see {command} --help)"
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
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Lossless speculative decoding of Llama models in JAX."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
