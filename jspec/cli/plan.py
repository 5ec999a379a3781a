"""`jspec plan`: predict memory use, speed and draft length on a device, without weights or the device."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from jspec.cli.common import UsageError, option, status_line
from jspec.cli.model_args import head_kind, is_model, sources
from jspec.cli.options import choice
from jspec.core.devices import DEVICES


def plan(
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Path, name or hub id [default: bundled one].")
    ] = None,
    draft: Annotated[str | None, typer.Argument(metavar="DRAFT", help="Smaller model, same tokenizer.")] = None,
    device: Annotated[Any, choice("--device", "Which to plan for [default: the one here].", *DEVICES)] = None,
    batch: Annotated[int, option("--batch", "N", "Texts at once.", min=1)] = 1,
    length: Annotated[
        int | None,
        option("--length", "N", "Tokens of each, half of them prompt [default: 4096, or what models have].", min=1),
    ] = None,
    acceptance: Annotated[
        float, option("--acceptance", "X", "Assumed probability that a guess is accepted.", min=0, max=1)
    ] = 0.8,
    num_draft_tokens: Annotated[
        int | None, option("--num-draft-tokens", "N", "Tokens guessed a round [default: the best].", min=1, max=16)
    ] = None,
    quantize: Annotated[Any, choice("--quantize", "Round the weights of the draft.", "int8")] = None,
    as_json: Annotated[bool, option("--json", None, "One JSON object, for machines.")] = False,
) -> None:
    """Predict what of TARGET and DRAFT fits into a device, how fast they decode there, and how far to draft.

    Only their configurations are read: a folder with config.json will do, and of a hub id nothing else is
    downloaded. Nothing is measured; jspec tune does that.
    """
    if target and not draft:
        raise UsageError("TARGET needs DRAFT: a smaller model with the same tokenizer.")
    where = sources(target, draft)
    if not is_model(where.draft) or head_kind(where.draft) or where.looks_up:
        raise UsageError(f"DRAFT {draft} is no model, and only models can be planned; measure it by jspec tune.")
    with status_line() as set_status:
        from rich.console import Console

        import jspec
        from jspec.cli import report
        from jspec.planning.plan import NO_ROOM

        set_status("Reading configurations")
        requests: dict[str, Any] = {"batch": batch, "length": length, "acceptance": acceptance}
        options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "quantize": quantize}
        found = jspec.plan(where.target, where.draft, device=device, **requests, **options)
    advice = report.plan_advice(found)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found) | {"advice": advice}, allow_nan=False))
    if found.verdict == NO_ROOM:
        raise ValueError(advice)
    if not as_json:
        tables = report.memory_table(found), report.plan_table(found)
        Console(highlight=False).print(*tables, advice, sep="\n", soft_wrap=True)
