"""Code shared by the commands: options, status, and settings that the process needs before it imports jax."""

import json
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

import typer

from convert.json_file import Json

if TYPE_CHECKING:
    from jspec.core.sampling import SamplingParams
    from jspec.models.language_model import HasConfig


class UsageError(Exception):
    """An invalid option, or options that cannot be combined."""


def option(names: str, metavar: str | None, text: str, **checks: Any) -> object:
    """Return an option in the style that all commands share. Spaces separate the `names`."""
    return typer.Option(*names.split(), metavar=metavar, help=text, **checks)


def check_text(text: str, place: str, may_be_empty: bool = True) -> None:
    """Reject lone surrogates, which come from input that was not UTF-8. No tokenizer or output accepts them.

    Args:
        may_be_empty: whether empty text is valid, as it is with a tokenizer that adds BOS. The bundled pair's
            tokenizer adds none.
    """
    if not text and not may_be_empty:
        raise UsageError(f"{place} is empty; add some text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} is not UTF-8 text (character {error.start + 1}); convert it first.") from error


def check_texts(texts: Sequence[str], place: str, may_be_empty: bool = True) -> None:
    """Call `check_text` on each text. If there are several, errors include the text's number."""
    for number, text in enumerate(texts, 1):
        check_text(text, f"{place} {number}" if len(texts) > 1 else place, may_be_empty)


def chosen_sampling(
    target: "HasConfig",
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repetition_penalty: float | None,
) -> "SamplingParams":
    """Return the sampling parameters from the options that are not None. Print the defaults that the model sets."""
    from jspec.models.sampling_defaults import default_sampling, described

    given: dict[str, float | None] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given["repetition_penalty"] = repetition_penalty
    if defaults := described(target, **given):
        typer.echo(defaults, err=True)
    return default_sampling(target, **given)


def template_variables(assignments: Sequence[str]) -> dict[str, object]:
    """Parse the `--template` values ("NAME=VALUE") into a dict of variables keyed by name."""
    from jspec.text.template_variables import check_variables

    check_texts(assignments, "--template")
    variables: dict[str, object] = {}
    for assignment in assignments:
        name, is_assignment, value = assignment.partition("=")
        if not is_assignment:
            raise UsageError(f"--template {assignment!r} has no value; write NAME=VALUE.")
        if name in variables:
            raise UsageError(f"--template sets {name!r} twice; leave out one of the two.")
        variables[name] = _json_or_text(value)
    with wrong_options():
        return check_variables("--template", variables)


def _json_or_text(value: str) -> Json:
    """Parse `value` as JSON, or return it unchanged if it is not JSON. NaN and Infinity are not JSON."""
    try:
        return cast("Json", json.loads(value, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@contextmanager
def wrong_options() -> Generator[None]:
    """Convert a ValueError about the user's input, raised in the block, into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(error) from error


@contextmanager
def logged_to(emit: Callable[[str], None], warn: Callable[[str], None] | None = None) -> Generator[None]:
    """Send jspec's log messages in the block to `emit`, and its warnings to `warn`, but not to parent handlers."""
    log = logging.getLogger("jspec")
    handler = logging.Handler()
    handler.emit = lambda record: (emit if record.levelno < logging.WARNING else warn or emit)(record.getMessage())
    level, propagates = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagates


@contextmanager
def status_line() -> Generator[Callable[[str], None]]:
    """Show a status line, on terminals only. ``set_status(text)`` and jspec's log messages set its text.

    Warnings are printed to standard error and remain visible.
    """
    from rich.console import Console

    line = Console(stderr=True).status("Importing")

    def warn(text: str) -> None:
        line.console.print(f"warning: {text}", soft_wrap=True, highlight=False, markup=False)

    with line, logged_to(line.update, warn):
        yield line.update


@contextmanager
def timed(times: dict[str, float], name: str) -> Generator[None]:
    """Store the block's duration in seconds as ``times[name]``."""
    began = time.perf_counter()
    yield
    times[name] = time.perf_counter() - began
