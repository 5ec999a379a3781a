"""The options that several commands share, and the functions that interpret them."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bench.subject import Subject

Pair = Annotated[
    str,
    typer.Option(
        "--pair",
        help="bundled, 109m, or two Llama shapes as TARGET/DRAFT; append :int8 or :int4 to quantise that model.",
    ),
]
Batch = Annotated[int, typer.Option("--batch", min=1)]
Length = Annotated[int, typer.Option("--num-draft-tokens", min=1)]
Lengths = Annotated[list[int], typer.Option("--num-draft-tokens", help="May be repeated.")]
NewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1)]
Repeats = Annotated[int, typer.Option("--repeats", min=1)]
Acceptance = Annotated[
    float | None,
    typer.Option(
        "--acceptance", min=0, max=1, help="Accept draft tokens at this rate instead; results are labelled synthetic."
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0)]
Target = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="SRC", help="Your own target instead of --pair: a directory or a Hugging Face repo id."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="SRC", help="The target's draft, with the same tokenizer; or lookup, recycling or exit:N."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Your own prompts: UTF-8 text, one per line; a larger batch repeats them, a smaller one uses the first.",
    ),
]
Chatty = Annotated[
    str,
    typer.Option("--target", metavar="SRC", help="A chat model: a name that jspec models lists, or your own model."),
]
Requests = Annotated[int, typer.Option("--requests", min=1, max=16, help="Number of requests per kind.")]
HeldOut = Annotated[
    Path | None,
    typer.Option(
        "--held-out",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="A training run's folder, whose held-out questions replace the four kinds.",
    ),
]


def need(package: str, sentence: str) -> None:
    """Exit with `sentence` if `package` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise SystemExit(sentence)


@contextmanager
def one_sentence(kinds: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """If an error of one of `kinds` is raised, print its message as one sentence and exit the command."""
    try:
        yield
    except kinds as error:
        typer.echo(" ".join(str(error).split()), err=True)
        raise typer.Exit(1) from error


def known_kinds(names: str) -> str:
    """Reject comma-separated drafter kinds that cannot be trained."""
    from jspec.training.kinds import KINDS

    if wrong := [name for name in names.split(",") if name not in KINDS]:
        raise typer.BadParameter(f"{wrong[0]!r} cannot be trained; expected one of {', '.join(KINDS)}.")
    return names


Kind = Annotated[str, typer.Option("--kind", callback=known_kinds, help="Drafter kind, as in jspec.train_drafter.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="DIR", file_okay=False, help="Folder for the results, instead of bench/results."),
]


def measured(
    new_tokens: int,
    pair: str,
    target: str | None,
    draft: str | None,
    *rest: Path | None,
    by_model: bool = False,
    may_branch: bool = False,
    activation_bits: int = 24,
) -> "Subject":
    """Return the result of `bench.subject.find` for these options. Invalid options end the command with one sentence.

    Args:
        by_model: whether the command supports only drafts that are models.
        may_branch: whether the command supports drafters with their own tree.
        activation_bits: the precision of the activations of `target` and `draft`. See `jspec.load`.
    """
    from bench import subject

    with one_sentence((ValueError, OSError)):
        if by_model and not subject.drafts_by_model(draft):
            raise ValueError(f"This command requires a draft model, but {draft} is not a model; pass --draft SRC.")
        if draft == subject.RECYCLING and not may_branch:
            raise ValueError("This command drafts chains, but recycling drafts a tree; use python -m bench trees.")
        return subject.find(new_tokens, pair, target, draft, *rest, activation_bits=activation_bits)


def answering(
    new_tokens: int, target: str, output: Path | None, head: Path | None = None, activation_bits: int = 24
) -> "Subject":
    """Return a chat target with a trained head or prompt lookup. Invalid options end the command with one sentence."""
    draft = "lookup" if head is None else str(head)
    return need_template(measured(new_tokens, "bundled", target, draft, None, output, activation_bits=activation_bits))


def without_draft(new_tokens: int, target: str | None, output: Path | None) -> "Subject":
    """Return a target without a draft, the bundled target by default. Invalid options end the command."""
    return measured(new_tokens, "bundled", target, "lookup" if target else None, None, output)


def need_template(subject: "Subject") -> "Subject":
    """Return `subject`. If it has no chat template, end the command with one sentence."""
    if getattr(subject.tokenizer, "chat_template", None) is None:
        typer.echo(f"{subject.name} has no chat template; pass a chat model as --target.", err=True)
        raise typer.Exit(1)
    return subject
