"""What the commands have in common: options, status, what the process needs before jax is imported."""

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

CACHE_BYTES = 4 * 2**30  # of compiled programs in the folder, at most


class UsageError(Exception):
    """Options that do not go together."""


def option(names: str, metavar: str | None, text: str, **checks: Any) -> Any:
    """An option as all commands have them; `names` by spaces."""
    return typer.Option(*names.split(), metavar=metavar, help=text, **checks)


def check_text(text: str, place: str, may_be_empty: bool = True) -> None:
    """Refuse what was no UTF-8 and is a lone surrogate now: no tokenizer takes that, and no output.

    Args:
        may_be_empty: as with a tokenizer that starts every text with a token; that of the bundled pair does not.
    """
    if not text and not may_be_empty:
        raise UsageError(f"{place} is empty; give it some text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{place} is not UTF-8 text (character {error.start + 1}); convert it first.") from error


def check_texts(texts: Sequence[str], place: str, may_be_empty: bool = True) -> None:
    """`check_text` of each, which is named by its number if there are several."""
    for number, text in enumerate(texts, 1):
        check_text(text, f"{place} {number}" if len(texts) > 1 else place, may_be_empty)


def chosen_sampling(target: Any, **given: Any) -> Any:
    """Return the sampling parameters of the options that are not None; print those that are the model's own."""
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
    """The JSON value that `value` spells, or `value` itself; NaN and Infinity are not JSON."""
    try:
        return json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@contextmanager
def wrong_options() -> Iterator[None]:
    """A ValueError in the block, of prompts, is told as a mistake in the options."""
    try:
        yield
    except ValueError as error:
        raise UsageError(error) from error


@contextmanager
def logged_to(say: Callable[[str], None], warn: Callable[[str], None] | None = None) -> Iterator[None]:
    """Pass what jspec logs in the block to `say`, warnings to `warn`, and nothing to other handlers."""
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
    """``say(what)`` shows what the command is doing, and so does what jspec logs: one line, on a terminal only.

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
    """Put the seconds of a block into `times`."""
    began = time.perf_counter()
    yield
    times[name] = time.perf_counter() - began


def prepare_environment() -> None:
    """Keep compiled programs for the next run, in a folder of bounded size, and silence a notice of XLA's.

    Call it before anything is compiled. A folder that `JAX_COMPILATION_CACHE_DIR` names is left to its owner.
    """
    # XLA logs as errors, for every program it finds in the cache, hints on tuning that it stored there itself
    # ("+prefer-no-gather is not supported on the host machine", openxla/xla issue 44565). Its real errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # programs are run as they are found, so nobody else may write here
    except OSError:
        return  # a home that cannot be written: compile every time
    _add_times_of_use(folder)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_compilation_cache_max_size": CACHE_BYTES,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)
            if "jax" in sys.modules:  # it reads its environment only while it is imported
                sys.modules["jax"].config.update(name, value)


def _add_times_of_use(folder: Path) -> None:
    """Give every cached program the file in which JAX notes its last use.

    JAX removes the programs that were used longest ago. Without that file, as after a kill between two writes, it
    would stop writing to the folder.
    """
    for program in folder.glob("*-cache"):
        used = program.with_name(f"{program.name.removesuffix('-cache')}-atime")
        with suppress(OSError):  # another process may remove the program meanwhile
            if not used.exists():
                used.write_bytes(program.stat().st_mtime_ns.to_bytes(8, "little"))
