"""What the commands have in common: where models are, what the process needs before jax is imported."""

import os
from pathlib import Path
from typing import Any

import typer

STORE = ".safetensors"  # how the name of a datastore ends, and that of a model does not


class UsageError(Exception):
    """Options that do not go together."""


def option(name: str, metavar: str | None, text: str, **checks: Any) -> Any:
    """An option as all commands have them."""
    return typer.Option(name, metavar=metavar, help=text, **checks)


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


def load_models(target: str, draft: str | None) -> tuple[Any, list[Any]]:
    """The tokenizer, and the target with its draft, if any."""
    from jspec import RetrievalDrafter, load, text

    tokenizer = text.load_tokenizer(target)
    if draft is None:
        return tokenizer, [load(target)]
    if draft.endswith(STORE):
        return tokenizer, [load(target), RetrievalDrafter.load(draft)]
    text.check_same_tokenizer(tokenizer, text.load_tokenizer(draft))
    return tokenizer, [load(target), load(draft)]
