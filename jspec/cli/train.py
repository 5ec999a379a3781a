# pyright: reportUnknownArgumentType=false
"""`jspec train`: train a drafter for a target."""

import dataclasses
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from jspec.cli import interrupts
from jspec.cli import options as o
from jspec.cli.common import UsageError, logged_to, option, status_line
from jspec.cli.model_args import BUNDLED_TARGET, NONE, Precision, sources

if TYPE_CHECKING:
    from jspec.drafters.base import DraftSource
    from jspec.models.llama import Llama
    from jspec.training.fit import Progress

T = TypeVar("T")

_Stored = Annotated[
    bool,
    typer.Option(
        "--store/--no-store",
        help="Store the target's hidden states for the text on disk, or compute them in every step.",
    ),
]
_Written = Annotated[
    int | None,
    option(
        "--written-tokens",
        "N",
        "Tokens that the target generates to answer its own questions [default: 500000 without --data, 0 with it].",
        min=1,
        show_default=False,
    ),
]
_Data = Annotated[
    list[Path] | None,
    option(
        "--data",
        "FILE",
        "Text file, .jsonl file of chats or questions, or an earlier DIR to reuse its generated text; may be repeated "
        "[default: the target generates its own].",
        show_default=False,
        exists=True,
    ),
]
_Start = Annotated[
    str | None,
    option(
        "--start",
        "DRAFTER",
        "Start from this drafter of the same kind [default: an untrained one].",
        show_default=False,
    ),
]
_Measured = Annotated[bool, typer.Option("--measure/--no-measure", help="Measure the trained drafter on this device.")]


def train(
    folder: Annotated[
        Path, option("--output", "DIR", "Folder for the run; an interrupted run resumes from it.", file_okay=False)
    ],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Path, model name, Hugging Face repo id or org/repo:file.gguf [default: the bundled target].",
        ),
    ] = None,
    kind: Annotated[
        str, option("--kind", "KIND", "What to train: eagle, block, medusa, hydra, blockwise, kangaroo, pass or model.")
    ] = "eagle",
    data: _Data = None,
    start: _Start = None,
    steps: Annotated[int, option("--steps", "N", "Optimiser steps.", min=1)] = 2000,
    depth: Annotated[int, option("--depth", "N", "Consecutive tokens to learn to draft.", min=1)] = 4,
    loss: Annotated[str, option("--loss", "LOSS", "kl, reverse-kl, jsd, tvd or lk.")] = "lk",
    rate: Annotated[float, option("--rate", "X", "Peak learning rate, above 0 and below 1.")] = 6e-3,
    step_tokens: Annotated[int, option("--step-tokens", "N", "Tokens per step.", min=1)] = 2048,
    length: Annotated[int, option("--length", "N", "Longest sequence, in tokens; longer ones are split.", min=3)] = 512,
    written_tokens: _Written = None,
    draft_vocab: Annotated[int, option("--draft-vocab", "N", "Draft only the N most frequent tokens.", min=2)] = 8192,
    boost: Annotated[
        int, option("--boost", "K", "Train K draft models, each on the errors of earlier ones.", min=1)
    ] = 1,
    dtype: o.Dtype = None,
    seed: Annotated[
        int, option("--seed", "N", "Seed for the initial weights, the data order and the generated text.", min=0)
    ] = 0,
    stored: _Stored = True,
    measured: _Measured = True,
) -> None:
    """Train a drafter for TARGET and write it to DIR/drafter.

    The drafter learns to predict TARGET's output, from your text or from chats that TARGET generates. The output
    stays exactly TARGET's, whatever the drafter learns. A better drafter only makes decoding faster.
    """
    path = folder / "drafter"
    if path.exists() and not (folder / "state").exists():
        raise UsageError(f"{path} already exists, without the run that made it; choose another --output, or delete it.")
    where = sources(target or BUNDLED_TARGET, start or NONE)
    with status_line() as set_status:
        import jspec
        from jspec.training.train import Recipe

        recipe = Recipe(kind, steps, depth, loss, rate, step_tokens, length, written_tokens, draft_vocab, seed, boost)
        recipe.check()
        set_status("Loading")
        tokenizer, (model, begun) = where.tokenizer(), where.load(Precision(dtype, draft_quantize=NONE))
        how_saved(begun, where.target)  # raises before training if the drafter cannot be saved
    with interrupts.last_words(f"Stopped. The same command resumes from {folder}."):
        with _bar(steps) as tell:
            run: dict[str, Any] = {"data": data or None, "folder": folder, "start": begun, "store_states": stored}
            drafter = jspec.train_drafter(model, tokenizer, **run, say=tell, **dataclasses.asdict(recipe))
        if path.exists():
            typer.echo(f"{path} already exists.")
        else:
            rounded = _in_bfloat16(drafter)
            typer.echo(f"Wrote {rounded.save(path, **how_saved(rounded, where.target))}.")
        if measured:
            _measure(model, type(drafter).load(path, model, dtype), folder, depth)


def _in_bfloat16(drafter: T) -> T:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.dtype == jnp.float32 else leaf, drafter)


def how_saved(drafter: object, target: str) -> dict[str, Any]:
    """Return the options for saving `drafter`. A model gets the target's tokenizer, so that it can be used alone.

    A drafter that was trained from another keeps the other's layout, if programs that read this layout can run the
    drafter. An EAGLE head's own output head is saved, too, because other programs would use the first rows of the
    target's head.

    Raises:
        convert.CheckpointError: no layout can hold the drafter.
    """
    import convert
    import jspec
    from convert.heads.block import write_config as block_files
    from convert.heads.eagle.write_config import FORMATS, check_format

    if isinstance(drafter, jspec.ModelDrafter):
        return {"tokenizer": target}
    if isinstance(drafter, jspec.BlockDrafter):
        block = drafter.block
        return {"format": block_files.format_of(block.config, block.origin)}
    if not isinstance(drafter, jspec.EagleDrafter):
        return {}
    known = drafter.head.origin.layout if drafter.head.origin else "speculators"
    layout = known if known in FORMATS else "eagle"  # EAGLE-1, as speculators once wrote it
    config = drafter.head.config
    try:
        check_format(config, layout)
    except convert.CheckpointError:
        if layout != "sglang":
            raise
        check_format(config, layout := "speculators")
    return {"format": layout, "own_head": config.own_head}


@contextmanager
def _bar(steps: int) -> Generator[Callable[["Progress | int"], None]]:
    """Show a progress bar. ``tell(step)`` advances it; ``tell(progress)`` prints a line about the evaluation.

    Before the first step, the bar shows jspec's log messages about generating and reading text. Without a terminal,
    these messages are printed as lines.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    from jspec.cli.report import training_line

    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("Starting", total=steps)

        def tell(news: "Progress | int") -> None:
            if isinstance(news, int):
                bar.update(task, completed=news, description="Training")
            else:
                console.print(training_line(news), soft_wrap=True)

        def show(said: str) -> None:
            bar.update(task, description=said)
            if bar.disable:
                errors.print(said, soft_wrap=True)

        with logged_to(show):
            yield tell


def _measure(model: "Llama", drafter: "DraftSource", folder: Path, depth: int) -> None:
    """Measure the saved `drafter` on this device with held-out prompts, and print the results."""
    from rich.console import Console

    from jspec.cli import report
    from jspec.drafters import MultiDrafter, PassDrafter
    from jspec.drafters.base import own_tree
    from jspec.training.evaluate import measure
    from jspec.training.fit import read_log
    from jspec.training.train import PROMPTS

    prompts = json.loads((folder / PROMPTS).read_text(encoding="utf-8"))
    if not prompts:
        typer.echo("No held-out prompt leaves half of the target's positions free, so nothing is measured.")
        return
    *_, last = read_log(folder)
    if isinstance(drafter, MultiDrafter):
        typer.echo("With several models, the predicted values are for the first model only.")
    with status_line() as set_status:
        set_status("Measuring")
        tree = own_tree(drafter)
        lengths = {min(2, depth), depth} if tree is None else {tree.max_depth}
        if isinstance(drafter, PassDrafter):  # its tree has vectors after its last draft token
            lengths = {len(drafter.embeddings)}
        found = [
            measure(model, drafter, prompts, last, k, temperature)
            for temperature in (0.0, 1.0)
            for k in sorted(lengths)
        ]
    Console(highlight=False).print(report.training_table(found), soft_wrap=True)
