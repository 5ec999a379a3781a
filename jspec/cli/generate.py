"""`jspec generate`: text from prompts."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jspec.cli.shared import (
    STORE,
    UsageError,
    check_prompts,
    encode,
    load_models,
    load_tokenizer,
    option,
    prepare_environment,
    sources,
    status_line,
    timed,
)

if TYPE_CHECKING:
    from jspec.report import Completion
    from jspec.text import Batch
    from jspec.types import Output

EPILOG = """\b
With --json, each prompt gives one line, an object of
  prompt, text      strings
  tokens, logprobs  one entry for each new token; natural log of its probability
                    under the law it was drawn from
  origins           for each token "accepted", "corrected", "bonus" (always so
                    with --plain) or "no draft" (there was no guess to judge)
  finish_reason     "eos" or "length"
  num_draft_tokens  guessed a round, at most; with auto what it found; 0 is plain
                    decoding
  stats             tokens, rounds, drafted, judged, accepted, accepted_at (by
                    position in the draft), acceptance_rate (accepted over judged),
                    tokens_per_round, predicted_tokens_per_round (from that rate)
  times             import (of libraries), load (of models), compile (and measure,
                    with --num-draft-tokens auto), run: seconds for all prompts
                    together;
                    tokens_per_second: of this prompt

\b
Compiled programs are kept in ~/.cache/jspec/xla, or in JAX_COMPILATION_CACHE_DIR.
"""

_DRAFTED = 4  # tokens a round, unless told otherwise


def _length(text: str) -> int | str:
    """A number of draft tokens, or "auto"."""
    if text == "auto" or (text.isdecimal() and int(text) >= 1):
        return text if text == "auto" else int(text)
    raise typer.BadParameter(f"{text!r} is neither a whole number of at least 1 nor auto.")


def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Text to continue.", show_default=False)
    ] = None,
    target: Annotated[str | None, option("--target", "SRC", "Path, name or hub id [default: bundled one].")] = None,
    draft: Annotated[str | None, option("--draft", "SRC", "Smaller model, same tokenizer; or datastore.")] = None,
    plain: Annotated[bool, option("--plain", None, "Decode without a draft.")] = False,
    temperature: Annotated[float, option("--temperature", "X", "0 is greedy.", min=0)] = 1.0,
    top_k: Annotated[int, option("--top-k", "N", "Keep the N likeliest tokens; 0 is off.", min=0)] = 0,
    top_p: Annotated[
        float, option("--top-p", "X", "Keep the likeliest tokens of mass X; 1 is off.", min=0, max=1)
    ] = 1.0,
    min_p: Annotated[
        float, option("--min-p", "X", "Drop tokens below X times the likeliest; 0 is off.", min=0, max=1)
    ] = 0.0,
    seed: Annotated[int, option("--seed", "N", "Same seed, same text.", min=0, max=2**32 - 1)] = 0,
    max_new_tokens: Annotated[int, option("--max-new-tokens -n", "N", "Limit for each prompt.", min=1)] = 128,
    num_draft_tokens: Annotated[
        Any,
        option(
            "--num-draft-tokens",
            "N",
            "Tokens guessed a round (at most, by a datastore); auto: as measured first, in a minute or more.",
            parser=_length,
            show_default=str(_DRAFTED),
        ),
    ] = None,
    as_json: Annotated[bool, option("--json", None, "One JSON object a line, for machines.")] = False,
) -> None:
    """Continue each PROMPT, all as one batch; without any, standard input, taken whole, is the prompt.

    Put -- before prompts if one begins with a dash.

    The text goes to standard output, on a terminal in colours that show where every token came from; figures
    go to standard error.
    """
    if top_p == 0:
        raise UsageError("--top-p must be above 0; 1 is off.")
    if plain and num_draft_tokens is not None:
        raise UsageError("--plain decodes without a draft; leave out --num-draft-tokens.")
    may_be_empty = target is not None
    target, draft = sources(target, draft, plain)
    if prompts:
        check_prompts(prompts, "PROMPT", may_be_empty)
    else:
        prompts = [_standard_input()]
    prepare_environment()
    times: dict[str, float] = {}
    if num_draft_tokens == "auto":
        typer.echo("auto: measuring for a minute or more; `jspec tune` once and pass its number to save that", err=True)
    with status_line() as say:
        with timed(times, "import"):
            from jspec import decode, report, text  # noqa: F401, decode imports what decoding needs
            from jspec.sampling import SamplingParams
        say("Loading")
        with timed(times, "load"):
            tokenizer = load_tokenizer(target, draft)
            batch = encode(tokenizer, prompts)
            models = load_models(target, draft)
        eos_ids = text.eos_ids(models[0], tokenizer)
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        drafted = {"num_draft_tokens": _draft_length(draft, num_draft_tokens or _DRAFTED)} if draft else {}
        out = _decode(models, batch, max_new_tokens, seed, sampling, times, say, eos_ids=eos_ids, **drafted)
    completions = report.completions(prompts, batch, out, tokenizer, eos_ids)
    if as_json:
        _print_json(completions, out.stats.accepted_at.shape[1], times)
        return
    _print_text(completions, times, plain)
    if num_draft_tokens == "auto":
        typer.echo(_choice(out.stats.accepted_at.shape[1]), err=True)


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise UsageError("Give a prompt, as an argument or on standard input.")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not UTF-8 text (byte {error.start + 1}); convert it first.") from error
    if not text:
        raise UsageError("Standard input is empty; give a prompt there, or as an argument.")
    check_prompts([text], "Standard input", may_be_empty=False)
    return text


def _draft_length(draft: str, num_draft_tokens: int | str) -> Any:
    """How far to draft: with a datastore only where it has a guess."""
    from jspec import UpTo

    return UpTo(num_draft_tokens) if draft.endswith(STORE) and isinstance(num_draft_tokens, int) else num_draft_tokens


def _decode(
    models: list[Any],
    batch: "Batch",
    max_new_tokens: int,
    seed: int,
    sampling: Any,
    times: dict[str, float],
    say: Callable[[str], None],
    **options: Any,
) -> "Output":
    """Decode `batch` twice, first one token only: that compiles, so the second time is decoding alone."""
    import jax
    import numpy as np

    import jspec
    from jspec import text

    function: Callable[..., Output] = jspec.generate if len(models) == 1 else jspec.speculative_generate
    keys = text.request_keys(seed, len(batch.lengths))
    options["max_new_tokens"] = text.room(max_new_tokens, batch, _positions(models))

    def run(name: str, limits: Any) -> "Output":
        limited = dataclasses.replace(sampling, max_tokens=limits)
        with timed(times, name):
            out = function(*models, batch.tokens, batch.lengths, keys, sampling=limited, **options)
            return jax.device_get(out)

    say("Compiling, which is kept for the next time")
    run("compile", np.ones_like(batch.limits))
    say("Decoding")
    return run("run", np.where(batch.limits == 0, max_new_tokens, batch.limits))


def _positions(models: list[Any]) -> int:
    """How many tokens a text may have in all."""
    from jspec.drafters.model import as_drafter

    limits = [models[0].config.max_position_embeddings, *(as_drafter(draft).max_positions for draft in models[1:])]
    return min(limit for limit in limits if limit is not None)


def _choice(num_draft_tokens: int) -> str:
    """What "auto" has found, in one line."""
    found = (
        f"num_draft_tokens={num_draft_tokens} is the fastest" if num_draft_tokens else "plain decoding is the fastest"
    )
    return f"auto: {found}; measuring it is part of the compile time"


def _print_json(completions: Sequence["Completion"], num_draft_tokens: int, times: dict[str, float]) -> None:
    from jspec import report

    for done in completions:
        line = report.as_json(done) | {"num_draft_tokens": num_draft_tokens}
        line["times"] = times | {"tokens_per_second": len(done.tokens) / times["run"]}
        typer.echo(json.dumps(line, allow_nan=False))


def _print_text(completions: Sequence["Completion"], times: dict[str, float], plain: bool) -> None:
    """Text to standard output, in colour where that is a terminal; figures to standard error."""
    from rich.console import Console

    from jspec import report

    screen, figures = Console(highlight=False), Console(stderr=True, highlight=False)
    by_origin, marks = screen.is_terminal and not plain, screen.no_color or screen.color_system is None
    if by_origin:
        screen.print(report.legend(marks), end="\n\n")
    for done in completions:
        if by_origin:
            screen.print(report.marked(done) if marks else report.coloured(done), soft_wrap=True)
        else:
            typer.echo(done.prompt + done.text)
        figures.print(report.sentence(done, times["run"]), end="\n\n", style="dim", soft_wrap=True)
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
    total = sum(len(done.tokens) for done in completions) / times["run"]
    figures.print(f"{spent}; {total:.0f} tokens/s in all", style="dim", soft_wrap=True)
