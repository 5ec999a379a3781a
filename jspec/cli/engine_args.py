"""The engine that a command asks for."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from jspec.cli.common import UsageError
from jspec.cli.model_args import Sources


def engine_of(
    where: Sources,
    say: Callable[[str], None],
    dtype: Any,
    quantize: Any,
    far: Callable[[Any], Any],
    max_length: int | None,
    **wishes: Any,
) -> tuple[Any, Any]:
    """An engine that is not started, and its target's tokenizer.

    Args:
        far: how many tokens to draft with a drafter.
        max_length: None for the usual, or what the models know.
    """
    from jspec.engine import Engine

    say("Loading")
    with _mistakes():
        tokenizer = where.tokenizer()
        target, drafter = where.load(dtype, quantize)
        if drafter is not None:
            wishes["num_draft_tokens"] = far(drafter)
        return Engine(target, drafter, max_length=max_length, **wishes), tokenizer


def compile_all(engine: Any, say: Callable[[str], None]) -> None:
    """Compile all that the engine will run; where nobody sees what is said, a line tells what takes so long."""
    say("Compiling, which is kept for the next time")
    if sys.stderr and not sys.stderr.isatty():
        typer.echo("Compiling: minutes the first time, then kept and seconds", err=True)
    engine.device.compile()


@contextmanager
def _mistakes() -> Iterator[None]:
    """Models that do not go together are a mistake in the options; files that cannot be read are none."""
    from convert import CheckpointError

    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(" ".join(str(error).split())) from error
