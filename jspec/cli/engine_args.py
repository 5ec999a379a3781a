"""The engine for a command, built from its options."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from jspec.cli.common import UsageError
from jspec.cli.model_args import Sources


def engine_of(
    where: Sources,
    set_status: Callable[[str], None],
    dtype: Any,
    quantize: Any,
    draft_length: Callable[[Any], Any],
    max_length: int | None,
    **engine_options: Any,
) -> tuple[Any, Any]:
    """Return an engine that has not been started, and the target's tokenizer.

    Args:
        draft_length: a function that maps a drafter to the number of draft tokens.
        max_length: the maximum sequence length; None for the default length, or the models' maximum if it is smaller.
    """
    from jspec.engine import Engine

    set_status("Loading")
    with _mistakes():
        tokenizer = where.tokenizer()
        target, drafter = where.load(dtype, quantize)
        if drafter is not None:
            engine_options["num_draft_tokens"] = draft_length(drafter)
        return Engine(target, drafter, max_length=max_length, **engine_options), tokenizer


def compile_all(engine: Any, set_status: Callable[[str], None]) -> None:
    """Compile everything that the engine will run. If the status line is not visible, print a line about the wait."""
    set_status("Compiling (cached for the next run)")
    if sys.stderr and not sys.stderr.isatty():
        typer.echo("Compiling: takes minutes the first time, and seconds from the cache later", err=True)
    engine.device.compile()


@contextmanager
def _mistakes() -> Iterator[None]:
    """Raise UsageError for incompatible models, but not for files that cannot be read."""
    from convert import CheckpointError

    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(" ".join(str(error).split())) from error
