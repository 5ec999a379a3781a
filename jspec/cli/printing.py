"""The output of `jspec generate`."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from jspec.generation.complete import Completion


def choice_of_auto(num_draft_tokens: int) -> str:
    """Describe the choice made by "auto" in one line."""
    found = (
        f"num_draft_tokens={num_draft_tokens} is the fastest" if num_draft_tokens else "plain decoding is the fastest"
    )
    return f"auto: {found}; the measurement is part of the compile time"


def print_json(completions: Sequence["Completion"], num_draft_tokens: int, times: dict[str, float]) -> None:
    """Print one JSON object per line, as described in the command's epilog."""
    from jspec.cli import report

    for done in completions:
        line = report.as_json(done) | {"num_draft_tokens": num_draft_tokens}
        line["times"] = times | {"tokens_per_second": done.stats["tokens"] / times["run"]}
        typer.echo(json.dumps(line, allow_nan=False))


def print_text(completions: Sequence["Completion"], times: dict[str, float], by_origin: bool) -> None:
    """Print text to standard output, in colour on a terminal, and statistics to standard error."""
    from rich.console import Console

    from jspec.cli import report

    screen, figures = Console(highlight=False), Console(stderr=True, highlight=False)
    by_origin, marks = screen.is_terminal and by_origin, screen.no_color or screen.color_system is None
    if by_origin:
        screen.print(report.legend(marks), end="\n\n")
    for done in completions:
        if by_origin:
            screen.print(report.marked(done) if marks else report.coloured(done), soft_wrap=True)
        else:
            text = done.prompt + done.text if isinstance(done.prompt, str) else done.text
            typer.echo(report.visible(text) if screen.is_terminal else text)
        figures.print(report.sentence(done, times["run"]), end="\n\n", style="dim", soft_wrap=True)
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
    total = sum(done.stats["tokens"] for done in completions) / times["run"]
    figures.print(f"{spent}; {total:.0f} tokens/s in all", style="dim", soft_wrap=True)
