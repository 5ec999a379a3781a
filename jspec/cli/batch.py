"""`jspec batch`: complete all prompts of a file."""

import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jspec.cli import interrupts
from jspec.cli import options as o
from jspec.cli.common import (
    UsageError,
    check_texts,
    chosen_sampling,
    option,
    status_line,
    template_variables,
)
from jspec.cli.engine_args import compile_all, engine_draft_length, silent_engine
from jspec.cli.model_args import Precision, Sources, is_model, sources
from jspec.cli.ray_cluster import ray_cluster
from jspec.cli.read_prompts import conversation

if TYPE_CHECKING:
    from jspec.cluster.batch.job import Decode, Job
    from jspec.cluster.batch.prompt_files import Entry
    from jspec.cluster.batch.worker import Decoding
    from jspec.core.sampling import SamplingParams
    from jspec.core.tokenizer import Tokenizer
    from jspec.models.language_model import HasConfig
    from jspec.text.chat_template import Prompt

EPILOG = """\b
FILE is in JSON Lines or Parquet. Each row has a "prompt", which is text, or
"messages". The output repeats the rows, in the same format, and adds:
  prompt_index      the number of prompts before this one in FILE
  generated_text    the text, without the --stop string
  generated_tokens  the token ids
  finish_reason     "eos", "stop" or "length"

\b
A prompt's text depends only on the target, the options above --draft, and the
prompt's index. To continue a job that was interrupted, run the same command
again. --workers, --slots and the draft may differ.
"""
_File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Prompts, as .jsonl or .parquet.", exists=True, dir_okay=False)
]


def batch(
    file: _File,
    output: Annotated[Path, option("--output", "DIR", "Folder for the output, which is written in parts.")],
    target: o.Target = None,
    tokenizer_source: o.Tokenizer = None,
    chat: Annotated[bool, option("--chat", None, "Answer each text prompt as a message to a chat model.")] = False,
    template: o.Template = None,
    dtype: o.Dtype = None,
    quantize: o.Quantize = None,
    activation_bits: o.ActivationBits = "24",
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    seed: o.Seed = 0,
    max_new_tokens: o.MaxNewTokens = 128,
    stop: o.Stop = None,
    draft: o.Draft = None,
    plain: o.Plain = False,
    draft_quantize: o.DraftQuantize = None,
    num_draft_tokens: o.AutoDraftTokens = None,
    slots: Annotated[int, option("--slots", "N", "Prompts that each worker decodes at once.", min=1)] = 8,
    workers: Annotated[
        int | None,
        option(
            "--workers",
            "N",
            "Number of worker processes, which Ray starts.",
            min=1,
            show_default="decode in this process",
        ),
    ] = None,
    skip_bad: Annotated[bool, option("--skip-bad", None, "Leave out invalid prompts, and name them.")] = False,
) -> None:
    """Complete all prompts of FILE, and write them with their completions to a folder.

    Each prompt is completed exactly once. If workers fail, others decode their prompts again, with the same result.
    """
    check_texts(stop := stop or [], "--stop", may_be_empty=False)
    where = sources(target, draft, plain, tokenizer_source)
    draft_length = engine_draft_length(where, num_draft_tokens)
    precision = where.precision(dtype, quantize, draft_quantize, activation_bits)
    variables = template_variables(template or [])
    with status_line() as set_status:
        from jspec import __version__
        from jspec.cluster.batch.job import Job, part_size
        from jspec.cluster.batch.prompt_files import open_prompts
        from jspec.cluster.batch.worker import Decoding

        set_status("Reading the prompts")
        sampling = _sampling(where, temperature, top_k, top_p, min_p, repetition_penalty)
        decoding = Decoding(max_new_tokens, seed, sampling, tuple(stop), variables or None)
        prompts = open_prompts(file)
        entries, longest = _valid(prompts.entries(), where, decoding, chat, skip_bad)
        identity = dataclasses.asdict(decoding) | {"sampling": None} | dataclasses.asdict(sampling)
        identity |= {"dtype": dtype, "quantize": quantize, "activation_bits": activation_bits, "chat": chat}
        identity |= {"target": where.target, "tokenizer": tokenizer_source, "jspec": __version__}
        identity |= {"FILE's SHA-256": hashlib.sha256(file.read_bytes()).hexdigest()}
        job = Job.open(output, prompts, entries, identity, part_size(len(entries), workers or 1, slots))
    if not job.missing():
        return typer.echo(f"{output} is already complete", err=True)
    options = {"slots": slots, "max_length": longest, "num_draft_tokens": draft_length}
    with _decoder((where, precision, options), decoding, workers) as decode:
        _run(job, decode)


def _sampling(where: Sources, *given: Any) -> "SamplingParams":
    """Return the sampling parameters, from the options and the target's own defaults."""
    import convert

    model = SimpleNamespace(config=convert.read_config(convert.resolve(where.target)))
    return chosen_sampling(cast("HasConfig", model), *given)


def _positions(where: Sources) -> int:
    """Return the longest sequence that target and draft support, in tokens."""
    import convert

    models = [where.target, where.draft] if is_model(where.draft) and where.head_kind is None else [where.target]
    return min(convert.read_config(convert.resolve(model)).max_position_embeddings for model in models)


def _valid(
    entries: "Iterable[Entry]", where: Sources, decoding: "Decoding", chat: bool, skip_bad: bool
) -> "tuple[list[Entry], int]":
    """Return the valid entries, and the length of the longest sequence in tokens. Name the invalid entries.

    Raises:
        UsageError: `decoding` has template variables, but no entry is a conversation.
        ValueError: an entry is invalid and `skip_bad` is false, or no entry is valid.
    """
    from jspec.text.chat_template import is_conversation

    tokenizer, positions = where.tokenizer(), _positions(where)
    valid, longest, num_bad = list["Entry"](), 0, 0
    for entry in entries:
        try:
            entry, length = _checked(entry, tokenizer, decoding, chat, positions)
        except ValueError as error:
            num_bad += 1
            typer.echo(f"{'skipped: ' if skip_bad else ''}{error}", err=True)
        else:
            valid.append(entry)
            longest = max(longest, length)
    if num_bad and not (valid and skip_bad):
        advice = "there is nothing left to do." if skip_bad else "correct them, or leave them out with --skip-bad."
        raise ValueError(f"{num_bad} of {num_bad + len(valid)} prompts are invalid; {advice}")
    if decoding.template and not any(is_conversation(cast("Prompt", entry.prompt)) for entry in valid):
        raise UsageError("--template applies only to conversations; add --chat.")
    return valid, longest


def _checked(
    entry: "Entry", tokenizer: "Tokenizer", decoding: "Decoding", chat: bool, positions: int
) -> "tuple[Entry, int]":
    """Return the entry, as a conversation if `chat`, and the length of its longest sequence in tokens.

    Raises:
        ValueError: the prompt is invalid or too long.
    """
    from jspec.text.chat_template import ids_of_prompt

    if isinstance(entry.prompt, ValueError):
        raise entry.prompt
    prompt = conversation(entry.prompt, None) if chat else entry.prompt
    length = len(ids_of_prompt(tokenizer, prompt, entry.place, decoding.template or {}))
    if length + decoding.max_new_tokens > positions:
        raise ValueError(
            f"{entry.place} needs {length} + {decoding.max_new_tokens} tokens, for the prompt and its completion, but "
            f"the models support only {positions}; shorten it, or pass a smaller --max-new-tokens."
        )
    return entry._replace(prompt=prompt), length + decoding.max_new_tokens


@contextmanager
def _decoder(
    engine_args: tuple[Sources, Precision, dict[str, Any]], decoding: "Decoding", workers: int | None
) -> "Generator[Decode]":
    """Yield a function that completes parts, in this process or on Ray.

    Args:
        engine_args: the arguments of `silent_engine`.

    Raises:
        UsageError: Ray is not installed, or its cluster does not have the resources.
    """
    from jspec.cluster.batch.worker import Worker

    if workers is None:
        with status_line() as set_status:
            set_status("Loading")
            engine, tokenizer = silent_engine(*engine_args)
            compile_all(engine, set_status)
        with closing(Worker(engine, tokenizer, decoding)) as worker:
            yield worker.decode
        return
    with ray_cluster("--workers"):
        import_module("ray.data")  # adds the handlers below
        from jspec.cluster.batch.ray_data import decode_on_ray
        from jspec.cluster.resources import check_resources, default_resources

        resources = default_resources()
        try:
            check_resources(workers, resources)
        except ValueError as error:
            raise UsageError(f"--workers: {error}") from error
        for handler in logging.getLogger("ray.data").handlers:
            if handler.name == "console":
                handler.setLevel(logging.CRITICAL)  # the command has its own progress bar and error messages
        make_engine = functools.partial(silent_engine, *engine_args)
        yield functools.partial(decode_on_ray, make_engine, decoding, workers, resources)


def _run(job: "Job", decode: "Decode") -> None:
    """Decode the missing parts. Show a progress bar, and print what was done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total, missing = sum(len(part.prompts) for part in job.parts), sum(len(part.prompts) for part in job.missing())
    columns = TextColumn("Prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began, num_tokens = time.perf_counter(), 0
    advice = "Run the same command again to continue."
    with interrupts.last_words(advice), Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=total, completed=total - missing)

        def report(prompts: int, tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            progress.advance(bar, prompts)

        job.run(decode, report)
    seconds = time.perf_counter() - began
    earlier = f" ({total - missing:,} were complete before)" if missing < total else ""
    typer.echo(
        f"{job.folder}: {total:,} prompts in {len(job.parts):,} files{earlier}; {num_tokens:,} new tokens in "
        f"{seconds:,.0f} s",
        err=True,
    )
