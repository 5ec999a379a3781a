"""`jspec tune`: measure how far to draft."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jspec.cli import options as o
from jspec.cli.common import (
    UsageError,
    check_texts,
    option,
    status_line,
    wrong_options,
)
from jspec.cli.model_args import EXIT, exit_name, sources

if TYPE_CHECKING:
    from jspec.drafters import EarlyExitDrafter
    from jspec.drafters.base import DraftSource
    from jspec.models.llama import Llama
    from jspec.text.chat_template import Batch
    from jspec.tuning.tune_chain import Tuning

_NewTokens = Annotated[
    int,
    option("--max-new-tokens -n", "N", "New tokens per text; at least 4 times --max-draft-tokens, plus 4.", min=1),
]


def tune(
    target: o.TargetArgument = None,
    draft: Annotated[
        str | None,
        typer.Argument(
            metavar="DRAFT",
            help="Smaller model with the same tokenizer; head's folder; datastore; lookup; exit:N; or exit.",
        ),
    ] = None,
    tokenizer_source: o.Tokenizer = None,
    prompts: Annotated[
        list[str] | None,
        option("--prompt", "TEXT", "Text to continue; may be repeated [default: Python code].", show_default=False),
    ] = None,
    batch: Annotated[
        int | None,
        option("--batch", "N", "Number of sequences; prompts repeat to fill it [default: one per prompt].", min=1),
    ] = None,
    temperature: Annotated[float, option("--temperature", "X", "0 is greedy.", min=0)] = 1.0,
    max_new_tokens: _NewTokens = 128,
    max_draft_tokens: Annotated[int, option("--max-draft-tokens", "N", "Longest draft to consider.", min=1)] = 8,
    max_nodes: Annotated[
        int, option("--max-nodes", "N", "Nodes of the largest tree to consider; 0 for chains only.", min=0)
    ] = 16,
    quantize: o.Quantize = None,
    draft_quantize: o.DraftQuantize = None,
    activation_bits: o.ActivationBits = "24",
    as_json: Annotated[bool, option("--json", None, "Print one JSON object.")] = False,
) -> None:
    """Measure on this device how many tokens DRAFT should draft per round for TARGET, or which tree, if any.

    With exit as DRAFT, first find the layers of TARGET that should draft. The answer exit:N means TARGET's first N
    layers, and exit:N-I-J means these layers without layers I and J, counted from 0.

    The answer holds for this device, batch size and kind of text.
    """
    if (target and not draft) or draft == "none":
        raise UsageError(
            "TARGET needs DRAFT: a smaller model with the same tokenizer, a trained head's folder, a "
            "datastore, lookup, exit:N or exit."
        )
    where = sources(target, draft, may_search=True, tokenizer_source=tokenizer_source)
    precision = where.precision(None, quantize, draft_quantize, activation_bits)
    if where.has_tree:
        raise UsageError(f"{where.draft} drafts a tree of its own, so there is nothing to tune.")
    check_texts(prompts or [], "--prompt", may_be_empty=target is not None)
    with status_line() as set_status:
        import jax
        from rich.console import Console

        from jspec import text
        from jspec.cli import report
        from jspec.text.chat_template import encode
        from jspec.tuning.validate_tuning import check_tuning

        check_tuning(max_new_tokens, max_draft_tokens, max_nodes)
        set_status("Loading")
        rows = text.repeated(prompts or text.EXAMPLE_PROMPTS, batch)
        tokenizer = where.tokenizer()
        with wrong_options():
            encoded = encode(tokenizer, rows)
        found, drafter = _tune(where.load(precision), encoded, temperature, max_new_tokens, max_draft_tokens, max_nodes)
    conditions: dict[str, object] = {
        "batch": len(rows),
        "temperature": temperature,
        "device": jax.devices()[0].device_kind,
    }
    answer = {"draft": exit_name(cast("EarlyExitDrafter", drafter))} if where.draft == EXIT else {}
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found) | conditions | answer, allow_nan=False))
    else:
        advice = ": ".join([*answer.values(), report.advice(found)])
        Console(highlight=False).print(report.tuning_table(found, conditions), advice, sep="\n", soft_wrap=True)


def _tune(
    models: "tuple[Llama, DraftSource | None]",
    batch: "Batch",
    temperature: float,
    max_new_tokens: int,
    max_draft_tokens: int,
    max_nodes: int,
) -> "tuple[Tuning, DraftSource]":
    """Return the tuning and the drafter. If `models` has no drafter, use the target's best exit."""
    import jspec
    from jspec import text

    target, drafter = models
    request = batch.tokens, batch.lengths, text.request_keys(0, len(batch.lengths))
    options: dict[str, Any] = {
        "sampling": jspec.SamplingParams(temperature=temperature),
        "max_draft_tokens": max_draft_tokens,
    }
    if drafter is None:
        new_tokens = min(max_new_tokens, max(64, 4 * (max_draft_tokens + 1)))
        drafter = jspec.best_exit(target, *request, max_new_tokens=new_tokens, **options)
    return jspec.tune(target, drafter, *request, max_new_tokens=max_new_tokens, max_nodes=max_nodes, **options), drafter
