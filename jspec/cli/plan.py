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
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Path, model name, Hugging Face repo id or org/repo:file.gguf [default: the bundled target].",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Argument(metavar="DRAFT", help="Smaller model with the same tokenizer, or a block drafter.")
    ] = None,
    device: Annotated[str | None, choice("--device", "Device to plan for [default: this machine's].", *DEVICES)] = None,
    devices: Annotated[
        int, option("--devices", "N", "Number of devices over which both models are sharded.", min=1)
    ] = 1,
    batch: Annotated[int, option("--batch", "N", "Number of sequences.", min=1)] = 1,
    length: Annotated[
        int | None,
        option(
            "--length",
            "N",
            "Tokens per sequence, half of them in the prompt [default: 4096, or the models' limit].",
            min=1,
        ),
    ] = None,
    acceptance: Annotated[
        float, option("--acceptance", "X", "Assumed probability that a draft token is accepted.", min=0, max=1)
    ] = 0.8,
    num_draft_tokens: Annotated[
        int | None, option("--num-draft-tokens", "N", "Draft tokens per round [default: the best].", min=1, max=16)
    ] = None,
    quantize: Annotated[str | None, choice("--quantize", "Quantise the weights of the draft.", "int8", "int4")] = None,
    as_json: Annotated[bool, option("--json", None, "Print one JSON object.")] = False,
) -> None:
    """Predict whether TARGET and DRAFT fit on a device, how fast they decode there, and how many tokens to draft.

    Only their configurations are read, so a folder with config.json is enough. From a Hugging Face repo, only
    config.json or the named GGUF file is downloaded. Nothing is measured; for measurements, use jspec tune.
    """
    if target and not draft:
        raise UsageError("TARGET needs DRAFT: a smaller model with the same tokenizer.")
    where = sources(target, draft)
    if not is_model(where.draft) or head_kind(where.draft) not in (None, "block") or where.looks_up:
        raise UsageError(
            f"DRAFT {draft} is not a model, and jspec plan supports only models and block drafters; measure this draft "
            "with jspec tune."
        )
    with status_line() as set_status:
        from rich.console import Console

        import jspec
        from jspec.cli import report
        from jspec.planning.plan import NO_ROOM

        set_status("Reading configurations")
        requests: dict[str, Any] = {"num_devices": devices, "batch": batch, "length": length, "acceptance": acceptance}
        options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "quantize": quantize}
        found = jspec.plan(where.target, where.draft, device=device, **requests, **options)
    advice = report.plan_advice(found)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found) | {"advice": advice}, allow_nan=False))
    if found.verdict == NO_ROOM:
        raise ValueError(advice)
    if not as_json:
        parts = [report.block_line(found), ""] if found.block else []
        tables = report.memory_table(found), *parts, report.plan_table(found)
        Console(highlight=False).print(*tables, advice, sep="\n", soft_wrap=True)
