"""What the commands have in common: where models are, what the process needs before jax is imported."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from jspec.text import Batch

STORE = ".safetensors"  # how the name of a datastore ends, and that of a model does not


class UsageError(Exception):
    """Options that do not go together."""


def option(names: str, metavar: str | None, text: str, **checks: Any) -> Any:
    """An option as all commands have them; `names` by spaces."""
    return typer.Option(*names.split(), metavar=metavar, help=text, **checks)


def check_prompts(prompts: Sequence[str], where: str, may_be_empty: bool) -> None:
    """Refuse what was no UTF-8 and is a lone surrogate now: no tokenizer takes that, and no output.

    Args:
        may_be_empty: as with a tokenizer that starts every text with a token; that of the bundled pair does not.
    """
    for number, prompt in enumerate(prompts, 1):
        place = f"{where} {number}" if len(prompts) > 1 else where
        if not prompt and not may_be_empty:
            raise UsageError(f"{place} is empty; give it some text.")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{place} is not UTF-8 text (character {error.start + 1}); convert it first.") from error


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """``say(what)`` shows what the command is doing, and so does what jspec logs: one line, on a terminal only."""
    from rich.console import Console

    log, line = logging.getLogger("jspec"), Console(stderr=True).status("Importing")
    handler = logging.Handler()
    handler.emit = lambda record: line.update(record.getMessage())
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        with line:
            yield line.update
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@contextmanager
def timed(times: dict[str, float], name: str) -> Iterator[None]:
    """Put the seconds of a block into `times`."""
    began = time.perf_counter()
    yield
    times[name] = time.perf_counter() - began


def sources(target: str | None, draft: str | None, plain: bool) -> tuple[str, str | None]:
    """Where the models are; no draft with `plain`."""
    if plain and draft:
        raise UsageError("--plain decodes without a draft; leave out --draft.")
    if draft and not target and not draft.endswith(STORE):
        raise UsageError("--draft needs --target, unless it is a datastore (*.safetensors, see jspec index).")
    if target and not draft and not plain:
        raise UsageError("--target needs --draft, a smaller model with the same tokenizer; or --plain, to do without.")
    if draft and draft.endswith(STORE) and not Path(draft).is_file():
        raise FileNotFoundError(f"{draft} does not exist; jspec index makes a datastore of texts.")
    bundled = Path(__file__).parent.parent / "pair_data"
    target, draft = target or str(bundled / "target"), draft or str(bundled / "draft")
    return target, None if plain else draft


def prepare_environment() -> None:
    """Before jax is imported: keep compiled programs for the next run, and silence two notices."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
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
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def encode(tokenizer: Any, prompts: Sequence[str]) -> "Batch":
    """`prompts` as one batch; an empty one is a wrong option here."""
    from jspec import text

    try:
        return text.encode(tokenizer, prompts)
    except ValueError as error:
        raise UsageError(error) from error


def load_tokenizer(target: str, draft: str | None) -> Any:
    """The tokenizer of the target, which is the draft's, too."""
    from jspec import text

    tokenizer = text.load_tokenizer(target)
    if draft and not draft.endswith(STORE):
        text.check_same_tokenizer(tokenizer, text.load_tokenizer(draft))
    return tokenizer


def load_models(target: str, draft: str | None) -> list[Any]:
    """The target, and its draft, if any."""
    from jspec import RetrievalDrafter, load

    if draft is None:
        return [load(target)]
    return [load(target), RetrievalDrafter.load(draft) if draft.endswith(STORE) else load(draft)]
