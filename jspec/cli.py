"""The `jspec` command. Nothing slow is imported until a command runs, so that help comes at once."""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jspec import __version__

if TYPE_CHECKING:
    from jspec.report import Completion
    from jspec.text import Batch
    from jspec.tuning import Tuning
    from jspec.types import Output

_STORE = ".safetensors"  # how the name of a datastore ends, and that of a model does not
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
_EPILOG = """\b
With --json, each prompt gives one line, an object of
  prompt, text      strings
  tokens, logprobs  one entry for each new token; natural log of its probability
                    under the law it was drawn from
  origins           for each token "accepted", "corrected" or "bonus" (always
                    "bonus" with --plain)
  finish_reason     "eos" or "length"
  stats             tokens, rounds, drafted, accepted, accepted_at (by position in
                    the draft), acceptance_rate (of the drafts that were judged),
                    tokens_per_round, predicted_tokens_per_round (from that rate)
  times             load, compile (and measure, with --num-draft-tokens auto), run:
                    seconds for all prompts together;
                    tokens_per_second: of this prompt

\b
Compiled programs are kept in ~/.cache/jspec/xla, or in JAX_COMPILATION_CACHE_DIR.
"""


class UsageError(Exception):
    """Options that do not go together."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 failed, 2 wrong usage. A failure is one sentence on stderr."""
    try:
        code = app(arguments, prog_name="jspec", standalone_mode=False)
    except Exception as error:
        code, message = _explained(error, _command(sys.argv[1:] if arguments is None else arguments))
        print(f"jspec: {message}", file=sys.stderr)
    sys.exit(code)


def _command(arguments: Sequence[str]) -> str:
    """What to ask for help."""
    known = [arguments[0]] if arguments and arguments[0] in ("generate", "tune", "index") else []
    return " ".join(["jspec", *known])


def _explained(error: Exception, command: str) -> tuple[int, str]:
    """Exit code and one line for what a person can mend; anything else is a bug and keeps its traceback."""
    if message := getattr(error, "format_message", None):  # the command line parser's own errors
        return 2, f"{message()} (see {command} --help)"
    if isinstance(error, UsageError):
        return 2, f"{error} (see {command} --help)"
    if isinstance(error, ValueError | OSError):
        return 1, " ".join(str(error).split())
    if "RESOURCE_EXHAUSTED" in str(error):
        return (
            1,
            "out of memory; use smaller models, fewer or shorter prompts, or a smaller --max-new-tokens.",
        )
    raise error


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"jspec {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Lossless speculative decoding of Llama models in JAX."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _length(text: str) -> int | str:
    """A number of draft tokens, or "auto"."""
    if text == "auto" or (text.isdecimal() and int(text) >= 1):
        return text if text == "auto" else int(text)
    raise typer.BadParameter(f"{text!r} is neither a whole number of at least 1 nor auto.")


def _option(name: str, metavar: str | None, text: str, **checks: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, **checks)


@app.command(epilog=_EPILOG)
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Text to continue.", show_default=False)
    ] = None,
    target: Annotated[str | None, _option("--target", "SRC", "Directory or hub id [default: the bundled one].")] = None,
    draft: Annotated[str | None, _option("--draft", "SRC", "Smaller model, same tokenizer; or datastore.")] = None,
    plain: Annotated[bool, _option("--plain", None, "Decode without a draft.")] = False,
    temperature: Annotated[float, _option("--temperature", "X", "0 is greedy.", min=0)] = 1.0,
    top_k: Annotated[int, _option("--top-k", "N", "Keep the N likeliest tokens; 0 is off.", min=0)] = 0,
    top_p: Annotated[
        float, _option("--top-p", "X", "Keep the likeliest tokens of mass X; 1 is off.", min=0, max=1)
    ] = 1.0,
    min_p: Annotated[
        float, _option("--min-p", "X", "Drop tokens below X times the likeliest; 0 is off.", min=0, max=1)
    ] = 0.0,
    seed: Annotated[int, _option("--seed", "N", "Same seed, same text.", min=0, max=2**32 - 1)] = 0,
    max_new_tokens: Annotated[int, _option("--max-new-tokens", "N", "Limit for each prompt.", min=1)] = 128,
    num_draft_tokens: Annotated[
        Any, _option("--num-draft-tokens", "N", "Tokens guessed a round; auto: as jspec tune finds.", parser=_length)
    ] = "4",
    as_json: Annotated[bool, _option("--json", None, "One JSON object a line, for machines.")] = False,
) -> None:
    """Continue each PROMPT, all as one batch; without any, standard input, taken whole, is the prompt.

    The text goes to standard output, on a terminal in colours that show where every token came from; figures
    go to standard error.
    """
    if top_p == 0:
        raise UsageError("--top-p must be above 0; 1 is off.")
    target, draft = _sources(target, draft, plain)
    prompts = prompts or [_standard_input()]
    began = time.perf_counter()
    _prepare_environment()
    from rich.console import Console

    from jspec import report, text
    from jspec.sampling import SamplingParams

    with Console(stderr=True).status("Loading; compiling, which is kept for the next time"):
        tokenizer, models = _load(target, draft)
        batch, ends = text.encode(tokenizer, prompts), text.end_ids(models[0], tokenizer)
        times = {"load": time.perf_counter() - began}
        sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        fixed = {"max_new_tokens": max_new_tokens} | ({} if plain else {"num_draft_tokens": num_draft_tokens})
        out = _decode(models, batch, seed, sampling, times, eos_ids=ends, **fixed)
    completions = report.completions(prompts, batch, out, tokenizer, ends)
    if as_json:
        _print_json(completions, times)
    else:
        _print_text(completions, times, plain)


@app.command()
def tune(
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="Directory or hub id [default: the bundled one].")
    ] = None,
    draft: Annotated[str | None, typer.Argument(metavar="DRAFT", help="Smaller model with the same tokenizer.")] = None,
    prompts: Annotated[
        list[str] | None,
        _option("--prompt", "TEXT", "Text to continue; may be given again [default: some Python].", show_default=False),
    ] = None,
    batch: Annotated[
        int | None, _option("--batch", "N", "Texts at once; prompts repeat [default: one for each prompt].", min=1)
    ] = None,
    temperature: Annotated[float, _option("--temperature", "X", "0 is greedy.", min=0)] = 1.0,
    max_new_tokens: Annotated[int, _option("--max-new-tokens", "N", "Limit of the texts to come.", min=1)] = 128,
    max_draft_tokens: Annotated[int, _option("--max-draft-tokens", "N", "The most to consider.", min=1)] = 8,
    as_json: Annotated[bool, _option("--json", None, "One JSON object, for machines.")] = False,
) -> None:
    """Measure on this device how many tokens TARGET should have DRAFT guess a round, if any.

    The answer holds for this device, batch size and kind of text.
    """
    if target and not draft:
        raise UsageError("TARGET needs DRAFT, a smaller model with the same tokenizer.")
    target, draft = _sources(target, draft, plain=False)
    _prepare_environment()
    import jax
    from rich.console import Console

    from jspec import report, text

    with Console(stderr=True).status("Loading, compiling, measuring"):
        tokenizer, models = _load(target, draft)
        rows = text.repeated(prompts or text.PYTHON, batch)
        found = _tune(models, text.encode(tokenizer, rows), temperature, max_new_tokens, max_draft_tokens)
    conditions = {"batch": len(rows), "temperature": temperature, "device": jax.devices()[0].device_kind}
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found) | conditions, allow_nan=False))
    else:
        screen = Console(highlight=False)
        screen.print(report.tuning_table(found, conditions), report.advice(found), sep="\n", soft_wrap=True)


@app.command()
def index(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Text, UTF-8.", exists=True, dir_okay=False)],
    output: Annotated[Path, _option("--output", "STORE", "Where to write it; a name that ends in .safetensors.")],
    tokenizer: Annotated[str | None, _option("--tokenizer", "SRC", "Of the target [default: the bundled one].")] = None,
    max_ngram: Annotated[int, _option("--max-ngram", "N", "Tokens that are compared at most.", min=2)] = 8,
) -> None:
    """Make a datastore of each FILE, for --draft: it guesses what followed where FILE reads as the text does.

    The more FILE is like the texts to come, the better the guesses.
    """
    if output.suffix != _STORE:
        raise UsageError(f"--output must end in {_STORE}, as --draft knows datastores by that.")
    _prepare_environment()
    from jspec import RetrievalDrafter, text

    began = time.perf_counter()
    tokens, vocab_size = text.corpus(_sources(tokenizer, None, plain=True)[0], files)
    RetrievalDrafter.from_tokens(tokens, vocab_size, max_ngram).save(output)
    spent = time.perf_counter() - began
    typer.echo(f"{output}: {len(tokens)} tokens, {output.stat().st_size / 1e6:.1f} MB, {spent:.1f} s")


def _sources(target: str | None, draft: str | None, plain: bool) -> tuple[str, str | None]:
    """Where the models are; no draft with `plain`."""
    if plain and draft:
        raise UsageError("--plain decodes without a draft; leave out --draft.")
    if draft and not target and not draft.endswith(_STORE):
        raise UsageError("--draft needs --target, unless it is a datastore (*.safetensors, see jspec index).")
    if target and not draft and not plain:
        raise UsageError("--target needs --draft, a smaller model with the same tokenizer; or --plain, to do without.")
    bundled = Path(__file__).parent / "pair_data"
    target, draft = target or str(bundled / "target"), draft or str(bundled / "draft")
    return target, None if plain else draft


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise UsageError("Give a prompt, as an argument or on standard input.")
    return sys.stdin.read()


def _prepare_environment() -> None:
    """Before jax is imported: keep compiled programs for the next run, and silence two notices."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    # XLA logs as errors, for every program it finds in the cache, hints on tuning that it stored there itself
    # ("+prefer-no-gather is not supported on the host machine", openxla/xla issue 44565). Its real errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec" / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)  # programs are run as they are found, so nobody else may write here
    except OSError:
        return  # a home that cannot be written: compile every time
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _load(target: str, draft: str | None) -> tuple[Any, list[Any]]:
    """The tokenizer, and the target with its draft, if any."""
    from jspec import RetrievalDrafter, load, text

    tokenizer = text.load_tokenizer(target)
    if draft is None:
        return tokenizer, [load(target)]
    if draft.endswith(_STORE):
        return tokenizer, [load(target), RetrievalDrafter.load(draft)]
    text.check_same_tokenizer(tokenizer, text.load_tokenizer(draft))
    return tokenizer, [load(target), load(draft)]


def _decode(
    models: list[Any], batch: "Batch", seed: int, sampling: Any, times: dict[str, float], **options: Any
) -> "Output":
    """Decode `batch` twice, first one token only: that compiles, so the second time is decoding alone."""
    import jax

    import jspec
    from jspec import text

    function: Callable[..., Output] = jspec.generate if len(models) == 1 else jspec.speculative_generate
    keys = text.request_keys(seed, len(batch.lengths))

    def run(name: str, limits: Any) -> "Output":
        began = time.perf_counter()
        limited = dataclasses.replace(sampling, max_tokens=limits)
        out = function(*models, batch.tokens, batch.lengths, keys, sampling=limited, **options)
        out = jax.device_get(out)
        times[name] = time.perf_counter() - began
        return out

    run("compile", batch.limits * 0 + 1)
    return run("run", batch.limits)


def _tune(
    models: list[Any], batch: "Batch", temperature: float, max_new_tokens: int, max_draft_tokens: int
) -> "Tuning":
    """`jspec.tune` on the prompts alone, without the rows that fill up a batch."""
    import jspec
    from jspec import text

    target, draft = models
    prompts: Any = batch.tokens[: batch.count], batch.lengths[: batch.count], text.request_keys(0, batch.count)
    sampling = jspec.SamplingParams(temperature=temperature)
    return jspec.tune(
        target, draft, *prompts, max_new_tokens=max_new_tokens, sampling=sampling, max_draft_tokens=max_draft_tokens
    )


def _print_json(completions: Sequence["Completion"], times: dict[str, float]) -> None:
    from jspec import report

    for done in completions:
        line = report.as_json(done)
        line["times"] = times | {"tokens_per_second": len(done.tokens) / times["run"]}
        typer.echo(json.dumps(line, allow_nan=False))


def _print_text(completions: Sequence["Completion"], times: dict[str, float], plain: bool) -> None:
    """Text to standard output, in colour where that is a terminal; figures to standard error."""
    from rich.console import Console

    from jspec import report

    screen, figures = Console(highlight=False), Console(stderr=True, highlight=False)
    in_colour = screen.is_terminal and not plain
    if in_colour:
        screen.print(report.legend(), end="\n\n")
    for done in completions:
        if in_colour:
            screen.print(report.coloured(done), soft_wrap=True)
        else:
            typer.echo(done.prompt + done.text)
        figures.print(report.sentence(done, times["run"]), end="\n\n", style="dim", soft_wrap=True)
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())
    total = sum(len(done.tokens) for done in completions) / times["run"]
    figures.print(f"{spent}; {total:.0f} tokens/s in all", style="dim", soft_wrap=True)
