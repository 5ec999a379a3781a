"""The commands about draft tokens: acceptance by drafter, rule and tree, and the choice of draft length."""

from typing import Annotated

import typer

from bench.options import (
    Batch,
    Draft,
    Kind,
    Length,
    Lengths,
    NewTokens,
    Output,
    Pair,
    Prompts,
    Repeats,
    Target,
    Temperature,
    known_kinds,
    measured,
    need_template,
    without_draft,
)

app = typer.Typer()


@app.command()
def acceptance(
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    batch: Batch = 32,
    k: Length = 8,
    new_tokens: NewTokens = 256,
    temperature: Annotated[list[float], typer.Option("--temperature", help="May be repeated.")] = [0, 0.5, 1],  # noqa: B006
) -> None:
    """Measure acceptance by position, kind of prompt and temperature, and compare it with theory."""
    from bench import acceptance

    subject = measured(new_tokens, "bundled", target, draft, prompts, output, by_model=True)
    acceptance.run(subject, batch, k, new_tokens, temperature)


@app.command()
def drafters(
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    k: Length = 4,
    new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    requests: Annotated[int, typer.Option("--requests", min=1, max=8)] = 4,
    repeats: Repeats = 5,
    idle: Annotated[
        int, typer.Option("--idle-neurons", min=0, help="Idle neurons to add to each MLP of the target.")
    ] = 0,
) -> None:
    """Measure every drafter, rule and draft length, for new, repetitive and edited code."""
    from bench import drafters

    subject = measured(new_tokens, "bundled", target, draft, prompts, output, by_model=True)
    drafters.run(subject, k, new_tokens, temperature, requests, repeats, idle)


@app.command()
def rules(
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    batch: Batch = 64,
    k: Lengths = [2, 4, 8],  # noqa: B006
    new_tokens: NewTokens = 128,
    temperature: Annotated[list[float], typer.Option("--temperature", help="May be repeated.")] = [0.7, 1],  # noqa: B006
) -> None:
    """Measure the tokens per round under the rules rejection, block and coupled, for several drafters."""
    from bench import rules

    subject = measured(new_tokens, "bundled", target, draft, prompts, output, by_model=True)
    rules.run(subject, batch, k, new_tokens, temperature)


@app.command()
def trees(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    batch: Batch = 32,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Number of batches, run one after another.")] = 1,
    asked: Annotated[bool, typer.Option("--chats", help="Use questions of all kinds as prompts.")] = False,
    children: Annotated[int, typer.Option("--children", min=1, help="Maximum number of children per node.")] = 8,
    nodes: Annotated[list[int], typer.Option("--nodes", min=1, help="May be repeated.")] = [8, 16, 32],  # noqa: B006
    depth: Annotated[int, typer.Option("--max-depth", min=1)] = 4,
    new_tokens: NewTokens = 128,
    temperature: Temperature = 1.0,
    repeats: Repeats = 5,
    acceptance: Annotated[
        list[float],
        typer.Option("--acceptance", min=0, max=1, help="Synthetic acceptance rate of each child rank, in order."),
    ] = [],  # noqa: B006
) -> None:
    """Measure acceptance by the number of children, and compare the best trees with one chain and with several."""
    from bench import chats, trees
    from bench.play import Play
    from bench.subject import WIDTH

    subject, ends = measured(new_tokens, pair, target, draft, prompts, output, may_branch=True), ()
    if asked:
        subject, ends = chats.asked(need_template(subject), batch * requests), chats.ends(subject)
    play = Play(subject, subject.request(batch * requests, WIDTH), batch, new_tokens, temperature, ends)
    trees.run(play, children, nodes, depth, repeats, acceptance)


@app.command()
def noise(
    target: Annotated[
        str,
        typer.Option(
            "--target", metavar="SRC", help="Target of the second pair: a name from jspec models, or your own model."
        ),
    ] = "smollm2",
    draft: Annotated[str, typer.Option("--draft", metavar="SRC", help="Its draft: exit:N or a model.")] = "exit:25",
    output: Output = None,
    laws: Annotated[int, typer.Option("--laws", min=2, help="Number of distributions per pair, eight per text.")] = 256,
    noises: Annotated[int, typer.Option("--noises", min=1, help="Number of draws per distribution.")] = 64,
    repeats: Repeats = 10,
) -> None:
    """Compare two ways to sample, with one Gumbel per token or in two steps, on the bundled pair and another pair."""
    from bench import noise

    bundled = measured(1, "bundled", None, None, None, output)
    own = noise.with_questions(measured(1, "bundled", target, draft, None, output), laws)
    noise.run([bundled, own], laws, noises, repeats)


@app.command()
def regret(
    pair: Pair = "bundled",
    target: Target = None,
    draft: Draft = None,
    prompts: Prompts = None,
    output: Output = None,
    batch: Batch = 1,
    temperature: Temperature = 1.0,
    repeats: Repeats = 20,
    new_tokens: NewTokens = 128,
) -> None:
    """Measure how much slower the choice of `jspec tune` is than the best of a dozen settings."""
    from bench import regret

    regret.run(measured(new_tokens, pair, target, draft, prompts, output), batch, new_tokens, temperature, repeats)


@app.command()
def losses(
    target: Target = None,
    output: Output = None,
    kind: Kind = "eagle",
    texts: Annotated[int, typer.Option("--texts", min=16, help="Number of 256-token texts.")] = 4000,
    steps: Annotated[int, typer.Option("--steps", min=1)] = 250,
    depth: Annotated[int, typer.Option("--depth", min=1)] = 3,
    seeds: Annotated[int, typer.Option("--seeds", min=1)] = 3,
) -> None:
    """Train a drafter with each loss and several seeds, and measure its acceptance on held-out modules."""
    from bench import losses

    losses.run(without_draft(1, target, output), kind, texts, steps, depth, seeds)


@app.command()
def training(
    target: Target = None,
    output: Output = None,
    kinds: Annotated[
        str, typer.Option("--kinds", callback=known_kinds, help="Drafter kinds, separated by commas.")
    ] = "eagle,medusa,hydra,blockwise,kangaroo,pass,model",
    step_tokens: Annotated[int, typer.Option("--step-tokens", min=256)] = 2048,
    depth: Annotated[int, typer.Option("--depth", min=1)] = 4,
    draft_vocab: Annotated[int, typer.Option("--draft-vocab", min=2, help="Vocabulary of an EAGLE head.")] = 8192,
    repeats: Annotated[int, typer.Option("--repeats", min=1)] = 5,
) -> None:
    """Measure a training step: tokens per second, a breakdown of its time, and memory."""
    from bench import training

    training.run(without_draft(1, target, output), kinds.split(","), step_tokens, depth, draft_vocab, repeats)


@app.command()
def online(
    target: Target = None,
    output: Output = None,
    kind: Kind = "eagle",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps before serving.")] = 200,
    requests: Annotated[int, typer.Option("--requests", min=1)] = 40,
    batch: Annotated[int, typer.Option("--batch", min=1)] = 8,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 96,
    rate: Annotated[float, typer.Option("--rate", help="Learning rate while serving.")] = 1e-3,
) -> None:
    """Measure acceptance on a domain that is new to the drafter, request by request, with and without learning."""
    from bench import online

    online.run(without_draft(new_tokens, target, output), kind, steps, requests, batch, new_tokens, rate)
