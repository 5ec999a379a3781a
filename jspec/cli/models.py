"""`jspec models`: list the known model names."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jspec.bundled.head_data import head_of
from jspec.cli.common import option


def models(as_json: Annotated[bool, option("--json", None, "Print one JSON object per line.")] = False) -> None:
    """List the models that have a short name for --target, jspec.load and jspec.pretrained.

    The command does not use the network. A model marked "here" was found in its package or in the Hugging Face cache.
    """
    from convert import hub_names as names

    found = {name: names.find(name) for name in names.MODELS}
    if as_json:
        for name, model in names.MODELS.items():
            here = None if found[name] is None else str(found[name])
            fields = {"repo_id": model.repo_id, "parameters": model.parameters, "licence": model.licence}
            fields["drafter"] = "lookup" if head_of(name) is None else "lookup+head"
            typer.echo(json.dumps({"name": name, **fields, "get": model.command, "path": here}))
        return
    _print_table(found)


def _print_table(found: dict[str, Path | None]) -> None:
    from rich.console import Console
    from rich.table import Table

    from convert import hub_names as names

    table = Table("name", "size", "licence", "here, or how to get it", box=None, pad_edge=False)
    for name, model in names.MODELS.items():
        place = model.command if found[name] is None else "here"
        table.add_row(name, model.parameters, model.licence, place)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\njspec.pretrained uses prompt lookup for every model, and falls back to a trained head for smollm2."
    )
