"""Build a command's engine from its options."""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import typer

from jspec.cli.common import UsageError
from jspec.cli.model_args import Precision, Sources

if TYPE_CHECKING:
    from jspec.drafters.base import DraftSource
    from jspec.engine import Engine
    from jspec.text.tokenizer_file import TokenizerFile


def engine_of(
    where: Sources,
    set_status: Callable[[str], None],
    precision: Precision,
    draft_length: "Callable[[DraftSource], object]",
    max_length: int | Literal["auto"] | None,
    **engine_options: Any,
) -> "tuple[Engine, TokenizerFile]":
    """Return an engine that has not been started, and the target's tokenizer.

    Args:
        draft_length: a function that maps a drafter to the number of draft tokens.
        max_length: as in `jspec.engine.Engine`.
    """
    from jspec.engine import Engine

    set_status("Loading")
    with _mistakes():
        tokenizer = where.tokenizer()
        target, drafter = where.load(precision)
        if drafter is not None:
            engine_options["num_draft_tokens"] = draft_length(drafter)
        return Engine(target, drafter, max_length=max_length, **engine_options), tokenizer


def silent_engine(where: Sources, precision: Precision, options: Mapping[str, Any]) -> "tuple[Engine, TokenizerFile]":
    """Return an engine that has not been started, and the target's tokenizer. Show no status line.

    Args:
        options: the options of `jspec.engine.Engine`, including `num_draft_tokens`, `max_length` and `slots`.
    """
    rest = {"max_waiting": 4 * options["slots"], **options}
    draft_length, max_length = rest.pop("num_draft_tokens"), rest.pop("max_length")
    return engine_of(where, lambda _: None, precision, lambda _: draft_length, max_length, **rest)


def engine_draft_length(where: Sources, num_draft_tokens: int | str | None) -> int | str:
    """Return the number of draft tokens that the option selects. The default is "auto".

    Raises:
        UsageError: the option is set, but there is no draft.
    """
    if num_draft_tokens is not None and not where.drafts:
        raise UsageError("--plain (or --draft none) decodes without a draft; leave out --num-draft-tokens.")
    return "auto" if num_draft_tokens is None else num_draft_tokens


def compile_all(engine: "Engine", set_status: Callable[[str], None]) -> None:
    """Compile everything that the engine will run. If no status line is visible, print how long this can take."""
    set_status("Compiling (cached for the next run)")
    if sys.stderr and not sys.stderr.isatty():
        typer.echo("Compiling: this takes minutes the first time, and seconds once the programs are cached", err=True)
    engine.device.compile()


@contextmanager
def _mistakes() -> Generator[None]:
    """Raise UsageError for incompatible models, but not for files that cannot be read."""
    from convert import CheckpointError

    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(" ".join(str(error).split())) from error
