"""Code that the commands share: options, status, and settings that the process needs before jax is imported."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import typer

CACHE_BYTES = 4 * 2**30  # the most that compiled programs take in the folder


class UsageError(Exception):
    """Options that do not go together."""


def option(names: str, metavar: str | None, text: str, **checks: Any) -> Any:
    """Return an option in the style of all commands. Spaces separate the `names`."""
    return typer.Option(*names.split(), metavar=metavar, help=text, **checks)


def check_text(text: str, place: str, may_be_empty: bool = True) -> None:
    """Refuse a lone surrogate, which was not UTF-8 in the input: no tokenizer takes it, and no output.

    Args:
        may_be_empty: whether empty text is valid, as with a tokenizer that starts every text with a token. The bundled
            pair's tokenizer does not.
    """
    if not text and not may_be_empty:
        raise UsageError(f"{place} is empty; give it some text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} is not UTF-8 text (character {error.start + 1}); convert it first.") from error


def check_texts(texts: Sequence[str], place: str, may_be_empty: bool = True) -> None:
    """Call `check_text` for each text, and name it by its number if there are several."""
    for number, text in enumerate(texts, 1):
        check_text(text, f"{place} {number}" if len(texts) > 1 else place, may_be_empty)


def chosen_sampling(target: Any, **given: Any) -> Any:
    """Return the sampling parameters of the options that are not None; print those that come from the model."""
    from jspec.models.sampling_defaults import default_sampling, described

    if defaults := described(target, **given):
        typer.echo(defaults, err=True)
    return default_sampling(target, **given)


def template_variables(assignments: Sequence[str]) -> dict[str, Any]:
    """Read the values of --template, each "NAME=VALUE", as variables by name."""
    from jspec.text.template_variables import check_variables

    check_texts(assignments, "--template")
    variables: dict[str, Any] = {}
    for assignment in assignments:
        name, is_assignment, value = assignment.partition("=")
        if not is_assignment:
            raise UsageError(f"--template {assignment!r} has no value; give NAME=VALUE.")
        if name in variables:
            raise UsageError(f"--template sets {name!r} twice; leave one of them out.")
        variables[name] = _json_or_text(value)
    with wrong_options():
        return check_variables("--template", variables)


def _json_or_text(value: str) -> Any:
    """Return the JSON value that `value` spells, or `value` itself. NaN and Infinity are not JSON."""
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@contextmanager
def wrong_options() -> Iterator[None]:
    """Turn a ValueError in the block, which is about prompts, into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(error) from error


@contextmanager
def logged_to(say: Callable[[str], None], warn: Callable[[str], None] | None = None) -> Iterator[None]:
    """Pass jspec's log messages in the block to `say`, warnings to `warn`, and nothing to other handlers."""
    log = logging.getLogger("jspec")
    handler = logging.Handler()
    handler.emit = lambda record: (say if record.levelno < logging.WARNING else warn or say)(record.getMessage())
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
def status_line() -> Iterator[Callable[[str], None]]:
    """Show a line of status, on a terminal only. ``say(what)`` and jspec's log messages set its text.

    Warnings are printed to standard error and stay there.
    """
    from rich.console import Console

    line = Console(stderr=True).status("Importing")

    def warn(text: str) -> None:
        line.console.print(f"warning: {text}", soft_wrap=True, highlight=False, markup=False)

    with line, logged_to(line.update, warn):
        yield line.update


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Store the seconds that a block takes in `times`."""
    began = time.perf_counter()
    yield
    times[name] = time.perf_counter() - began


def prepare_environment() -> None:
    """Keep compiled programs for the next run, in a folder of bounded size, and silence a notice of XLA's.

    Call it before anything is compiled. A folder that `JAX_COMPILATION_CACHE_DIR` names stays as its owner set it up.
    """
    # For every program in the cache, XLA logs as errors the tuning hints that it stored there itself
    # ("+prefer-no-gather is not supported on the host machine", openxla/xla issue 44565). Its real errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # programs run as they are found, so no other user may write here
    except OSError:
        return  # the home folder cannot be written: compile every time
    _add_times_of_use(folder)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_compilation_cache_max_size": CACHE_BYTES,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)
            if "jax" in sys.modules:  # jax reads its environment only while it is imported
                sys.modules["jax"].config.update(name, value)


def _add_times_of_use(folder: Path) -> None:
    """Create the file in which JAX notes the last use of a cached program, for every program that lacks it.

    JAX removes the programs that were used longest ago. Without that file, such as after a kill between two writes, JAX
    would stop writing to the folder.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(f"{program.name.removesuffix('-cache')}-atime")
        with suppress(OSError):  # another process may remove the program meanwhile
            if not used.exists():
                used.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
