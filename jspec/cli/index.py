"""`jspec index`: build a datastore to draft from."""

from pathlib import Path
from typing import Annotated

import typer

from jspec.cli.common import UsageError, option, status_line, timed
from jspec.cli.model_args import STORE, sources


def index(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="UTF-8 text file.", exists=True, dir_okay=False)],
    output: Annotated[Path, option("--output", "STORE", "Datastore to write; its name must end in .safetensors.")],
    tokenizer: Annotated[
        str | None,
        option(
            "--tokenizer",
            "SRC",
            "Directory or Hugging Face repo id of the target's tokenizer [default: the bundled tokenizer].",
        ),
    ] = None,
    max_ngram: Annotated[int, option("--max-ngram", "N", "Longest n-gram to compare, in tokens.", min=2)] = 8,
) -> None:
    """Build one datastore from all FILEs, for use with --draft.

    A draft is the text that follows the most recent tokens where they occur in a FILE. The more the FILEs resemble
    the text that will be generated, the better the drafts.
    """
    if output.suffix != STORE:
        raise UsageError(f"--output must end in {STORE}, because --draft recognises datastores by that suffix.")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"{output.parent} is not a folder; create it first, or choose another --output.")
    times: dict[str, float] = {}
    with status_line() as set_status:
        from jspec import RetrievalDrafter, text

        with timed(times, "index"):
            set_status("Reading")
            tokens, vocab_size = text.corpus(sources(tokenizer, "none").target, files)
            set_status(f"Sorting {len(tokens)} tokens")
            RetrievalDrafter.from_tokens(tokens, vocab_size, max_ngram).save(output)
    size = output.stat().st_size / 1e6
    typer.echo(f"{output}: {len(tokens)} tokens, {size:.1f} MB, {times['index']:.1f} s")
