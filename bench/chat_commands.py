"""Commands in which a chat model answers questions, to compare the answers with transformers or to measure speed."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.options import (
    Batch,
    Chatty,
    HeldOut,
    Length,
    NewTokens,
    Output,
    Requests,
    Temperature,
    answering,
    measured,
    need,
    need_template,
    one_sentence,
)
from jspec.cli.options import Tree

app = typer.Typer()


@app.command()
def agreement(
    target: Chatty = "smollm2",
    output: Output = None,
    requests: Requests = 16,
    batch: Batch = 8,
    k: Length = 4,
    new_tokens: NewTokens = 128,
) -> None:
    """Check that a real model's greedy answers with every drafter match those of transformers. Needs torch."""
    _need_torch()
    from bench import agreement

    agreement.run(answering(new_tokens, target, output), requests, batch, k, new_tokens)


@app.command()
def answers(
    pair: Annotated[
        Literal["qwen-coder"] | None,
        typer.Option("--pair", help="Qwen2.5-Coder 1.5B with its 0.5B draft model, on coding questions."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="SRC", help="A chat model [default: smollm2, or the local target of --pair]."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="SRC", help="With --pair: another draft model.")
    ] = None,
    output: Output = None,
    batch: Annotated[list[int], typer.Option("--batch", min=1, max=16, help="May be repeated.")] = [1, 8],  # noqa: B006
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, max=16, help="Number of requests per kind [default: 4].")
    ] = None,
    questions: Annotated[
        int | None, typer.Option("--questions", min=1, max=64, help="With --pair: number of questions [default: 64].")
    ] = None,
    k: Annotated[
        list[int] | None,
        typer.Option(
            "--num-draft-tokens", min=1, help="Draft length [default: 4]; with --pair, several [default: 2, 4 and 6]."
        ),
    ] = None,
    new_tokens: NewTokens = 128,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="Number of repeats [default: 5].")] = None,
    temperature: Temperature = 0.0,
    head: Annotated[
        Path | None, typer.Option("--head", metavar="DIR", exists=True, help="Also measure this head for the target.")
    ] = None,
    tree: Tree = None,
    held_out: HeldOut = None,
    alone: Annotated[bool, typer.Option("--alone", help="Do not measure transformers and llama.cpp.")] = False,
    twins: Annotated[
        bool,
        typer.Option("--transformers", help="With --pair: also measure transformers' greedy decoding in float32."),
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="With --pair: also measure the length that tune chooses.")
    ] = False,
    bits: Annotated[int | None, typer.Option("--activation-bits", help="8, 16 or 24 bits per activation.")] = None,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            "--draft-vocabulary",
            metavar="N",
            min=1,
            help="With --pair: also measure the draft model with a vocabulary of only N tokens.",
        ),
    ] = None,
    draft_quantize: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(
            "--draft-quantize",
            help="With --pair: also measure a quantised draft, with --draft-vocabulary if given.",
        ),
    ] = None,
) -> None:
    """Measure a real model's tokens per second on four kinds of question, in jspec, transformers and llama.cpp."""
    if pair is not None:
        from bench import coder

        only_own = {"requests": requests, "repeats": repeats, "alone": alone}
        _reject("without --pair", **only_own, head=head, tree=tree, held_out=held_out)
        with one_sentence((ValueError, OSError)):
            run = coder.Run(
                questions=questions or 64,
                batches=tuple(batch),
                ks=tuple(k or (2, 4, 6)),
                new_tokens=new_tokens,
                temperature=temperature,
                with_transformers=twins,
                tune=tune,
                activation_bits=24 if bits is None else bits,
            )
            files = coder.find(target, draft)
        if twins:
            _need_torch()
        subject = need_template(
            measured(new_tokens, "bundled", *files, None, output, by_model=True, activation_bits=run.activation_bits)
        )
        with one_sentence((TypeError, ValueError)):
            small = coder.small_draft(subject, draft_vocabulary, draft_quantize)
        coder.measure(dataclasses.replace(subject, name=pair), files[0], run, small)
        return
    from bench import answers, chats

    only_pair = {"draft_vocabulary": draft_vocabulary, "draft_quantize": draft_quantize}
    _reject("with --pair", draft=draft, questions=questions, transformers=twins, tune=tune, **only_pair)
    if len(k or []) > 1:
        raise typer.BadParameter("--num-draft-tokens may be repeated only with --pair; pass one value.")
    if tree and head is None:
        raise typer.BadParameter("--tree requires a head that drafts the tree; pass --head, or omit --tree.")
    subject = answering(new_tokens, target or "smollm2", output, head, 24 if bits is None else bits)
    requests = requests or 4
    with one_sentence():
        asked = chats.by_kind(subject.tokenizer, max(requests, *batch), held_out)
    if bits is not None:
        subject = dataclasses.replace(subject, name=f"{subject.name}, {bits}-bit activations")
    length = k[0] if k else 4
    answers.run(subject, asked, batch, requests, length, new_tokens, repeats or 5, temperature, tree or (), not alone)


def _need_torch() -> None:
    """Exit with one sentence if torch is not installed."""
    need("torch", "transformers decodes with torch, which is not installed; run pip install torch")


def _reject(place: str, **options: object) -> None:
    """Reject options that work only with or only without --pair. None and False mean that an option was not given."""
    if given := [name.replace("_", "-") for name, value in options.items() if value not in (None, False)]:
        raise typer.BadParameter(f"--{given[0]} works only {place}; omit it.")
