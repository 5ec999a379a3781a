"""The command `python -m convert SRC DST`, also available as `jspec convert`.

It converts Hugging Face and GGUF checkpoints to Orbax. With `--to hf`, it writes the Hugging Face format instead.
"""

import enum
import functools
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from convert.errors import CheckpointError


class Dtype(enum.StrEnum):
    """The names in `convert.dtypes`, repeated here so that `--help` does not import that module."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Format(enum.StrEnum):
    """The output formats."""

    orbax = "orbax"
    hf = "hf"


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Directory, GGUF file, Hugging Face repo id or org/repo:file.gguf.")
    ],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Directory to create.")],
    to: Annotated[Format, typer.Option(help="Format to write.")] = Format.orbax,
    dtype: Annotated[Dtype | None, typer.Option(help="Cast to this dtype (default: the stored dtype).")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face repo.")] = None,
) -> None:
    """Convert a Hugging Face, Orbax or GGUF checkpoint to Orbax or Hugging Face, and check every tensor."""
    typer.echo(_convert(source, destination, to, dtype, revision))


def _convert(source: str, destination: Path, to: Format, dtype: str | None, revision: str | None) -> str:
    from rich.console import Console
    from rich.progress import track

    from convert import Checkpoint, save, save_hf, shapes
    from convert.loading import stream

    start = time.perf_counter()
    console = Console(stderr=True)
    config, directory, arrays = stream(source, dtype, revision)
    progress: dict[str, Any] = {
        "total": len(shapes(config)),
        "console": console,
        "transient": True,
        "disable": not console.is_terminal,
    }
    params = dict(track(arrays, "Reading", **progress))
    with console.status("Writing"):
        (save if to is Format.orbax else save_hf)(Checkpoint(config, params, directory), destination)
    size = sum(array.nbytes for array in params.values())
    kind = next(iter(params.values())).dtype
    seconds = time.perf_counter() - start
    return f"{destination}: {len(params)} arrays, {kind}, {size / 1e9:.2f} GB, {seconds:.1f} s"


@functools.wraps(convert)  # the same options and help
def main(**arguments: Any) -> None:
    try:
        convert(**arguments)
    except CheckpointError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
