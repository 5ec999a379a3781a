"""`jspec models`: list the known model names."""

import json
from pathlib import Path
from typing import Annotated

import typer

from jspec.bundled.head_data import head_of
from jspec.cli.common import option


def models(as_json: Annotated[bool, option("--json", None, "Print one JSON object per line.")] = False) -> None:
    """List the models with a short name (for --target, jspec.load and jspec.pretrained) and the cached GGUF files.

    The command does not use the network. A model marked "here" was found in its package or in the Hugging Face cache.
    """
    from convert import hub_files
    from convert import hub_names as names

    found = {name: names.find(name) for name in names.MODELS}
    cached = {str(source): (_quantisation(file), file) for source, file in hub_files.cached().items()}
    if as_json:
        _print_json(found, cached)
    else:
        _print_table(found)
        _print_files({source: quantisation for source, (quantisation, _) in cached.items()})


def _quantisation(file: Path) -> str:
    """Return the quantisation that a GGUF file names, "unnamed" if it names none, or "damaged"."""
    from convert.errors import CheckpointError
    from convert.gguf import header, tensor_types

    try:
        return tensor_types.file_type(header.read(file).metadata) or "unnamed"
    except CheckpointError:
        return "damaged"


def _print_json(found: dict[str, Path | None], cached: dict[str, tuple[str, Path]]) -> None:
    from convert import hub_names as names

    for name, model in names.MODELS.items():
        here = None if found[name] is None else str(found[name])
        fields = {"repo_id": model.repo_id, "parameters": model.parameters, "licence": model.licence}
        fields["drafter"] = "lookup" if head_of(name) is None else "lookup+head"
        typer.echo(json.dumps({"name": name, **fields, "draft": model.draft, "get": model.command, "path": here}))
    for source, (quantisation, file) in cached.items():
        typer.echo(json.dumps({"name": source, "quantisation": quantisation, "path": str(file)}))


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
    pairs = [f"{model.draft} for {name}" for name, model in names.MODELS.items() if model.draft]
    console.print(
        "\njspec.pretrained uses prompt lookup for every model, and falls back to a trained head for smollm2. "
        f"Draft models for --draft: {', '.join(pairs)}."
    )


def _print_files(quantisations: dict[str, str]) -> None:
    if quantisations:
        typer.echo("\nGGUF files in the Hugging Face cache:")
    for source, quantisation in quantisations.items():
        typer.echo(f"{quantisation:8} {source}")
