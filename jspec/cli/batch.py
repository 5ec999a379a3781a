"""`jspec batch`: complete all prompts of a file."""

import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from jspec.cli import interrupts
from jspec.cli import options as o
from jspec.cli.batch_prompts import valid_entries
from jspec.cli.common import (
    UsageError,
    check_texts,
    chosen_sampling,
    option,
    status_line,
    template_variables,
)
from jspec.cli.engine_args import compile_all, engine_draft_length, silent_engine
from jspec.cli.model_args import Precision, Sources, sources
from jspec.cli.ray_cluster import ray_cluster

if TYPE_CHECKING:
    from jspec.cluster.batch.batch_job import Decode, Job
    from jspec.cluster.batch.worker import Decoding
    from jspec.cluster.resources import Resources
    from jspec.core.sampling import SamplingParams
    from jspec.models.language_model import HasConfig

EPILOG = """\b
FILE is in JSON Lines or Parquet. Each row has a "prompt", which is text, or
"messages". The output repeats the rows, in the same format, and adds:
  prompt_index      the number of prompts before this one in FILE
  generated_text    the text, without the --stop string
  generated_tokens  the token ids
  finish_reason     "eos", "stop" or "length"

\b
A completion depends only on the prompt, its index, the kind of device, and the
options from --target to --stop. To continue an interrupted job, run the same
command again. --workers, --slots and the draft may differ.
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
    skip_bad: Annotated[bool, option("--skip-bad", None, "Report invalid prompts and leave them out.")] = False,
) -> None:
    """Complete all prompts of FILE, and write them with their completions to a folder.

    The output has exactly one completion for each prompt. If a worker fails, its prompts are decoded again. In float32,
    the result is the same.
    """
    check_texts(stop := stop or [], "--stop", may_be_empty=False)
    where = _absolute(sources(target, draft, plain, tokenizer_source))
    draft_length = engine_draft_length(where, num_draft_tokens)
    precision = where.precision(dtype, quantize, draft_quantize, activation_bits)
    variables = template_variables(template or [])
    with status_line() as set_status:
        from jspec import __version__
        from jspec.cluster.batch.batch_job import Job, part_size
        from jspec.cluster.batch.prompt_files import open_prompts
        from jspec.cluster.batch.worker import Decoding

        set_status("Reading the prompts")
        sampling = _sampling(where, temperature, top_k, top_p, min_p, repetition_penalty)
        decoding = Decoding(max_new_tokens, seed, sampling, tuple(stop), variables or None)
        prompts = open_prompts(file)
        entries, longest = valid_entries(prompts.entries(), where, decoding, chat, skip_bad)
    identity = dataclasses.asdict(decoding) | {"sampling": None} | dataclasses.asdict(sampling)
    identity |= {"dtype": dtype, "quantize": quantize, "activation_bits": activation_bits, "chat": chat}
    identity |= {"target": where.target, "tokenizer": where.tokenizer_source, "jspec": __version__}
    with file.open("rb") as content:
        identity |= {"SHA-256 of FILE": hashlib.file_digest(content, "sha256").hexdigest()}
    options = {"slots": slots, "max_length": longest, "num_draft_tokens": draft_length}
    with _cluster(workers) as resources:
        identity["device"] = _device(resources)
        job = Job.open(output, prompts, entries, identity, part_size(entries[-1].prompt_index + 1, workers or 1, slots))
        if not job.missing():
            return typer.echo(f"{output} is already complete", err=True)
        with _decoder((where, precision, options), decoding, workers, resources) as decode:
            _run(job, decode)


def _absolute(where: Sources) -> Sources:
    """Return `where` with absolute paths, because workers have other working directories."""
    names = {"target": where.target, "draft": where.draft, "tokenizer_source": where.tokenizer_source}
    absolute = {name: str(Path(value).absolute()) for name, value in names.items() if value and Path(value).exists()}
    return dataclasses.replace(where, **absolute)


def _sampling(where: Sources, *given: Any) -> "SamplingParams":
    """Return the sampling parameters, from the options and the target's own defaults."""
    import convert

    model = SimpleNamespace(config=convert.read_config(convert.resolve(where.target)))
    return chosen_sampling(cast("HasConfig", model), *given)


@contextmanager
def _cluster(workers: int | None) -> "Generator[Resources | None]":
    """Connect to a Ray cluster if there are workers, and yield the resources of each worker, or None.

    Raises:
        UsageError: Ray is not installed, or its cluster does not have the resources.
    """
    if workers is None:
        yield None
        return
    with ray_cluster("--workers"):
        from jspec.cluster.resources import check_resources, default_resources

        resources = default_resources()
        try:
            check_resources(workers, resources)
        except ValueError as error:
            raise UsageError(f"--workers: {error}") from error
        yield resources


def _device(resources: "Resources | None") -> str:
    """Return the kind of device that decodes. The default dtype depends on it, so it is part of the job's identity."""
    import jax

    if resources is None:
        return jax.default_backend()
    return "gpu" if resources.gpus else "tpu" if resources.tpus else "cpu"


@contextmanager
def _decoder(
    engine_args: tuple[Sources, Precision, dict[str, Any]],
    decoding: "Decoding",
    workers: int | None,
    resources: "Resources | None",
) -> "Generator[Decode]":
    """Yield a function that completes parts, in this process or on Ray.

    Args:
        engine_args: the arguments of `silent_engine`.
    """
    from jspec.cluster.batch.worker import Worker

    if workers is None or resources is None:
        with status_line() as set_status:
            set_status("Loading")
            engine, tokenizer = silent_engine(*engine_args)
            compile_all(engine, set_status)
        with closing(Worker(engine, tokenizer, decoding)) as worker:
            yield worker.decode
        return
    import_module("ray.data")  # adds the handlers below
    from jspec.cluster.batch.ray_data import decode_on_ray

    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":
            handler.setLevel(logging.CRITICAL)  # the command has its own progress bar and error messages
    make_engine = functools.partial(silent_engine, *engine_args)
    yield functools.partial(decode_on_ray, make_engine, decoding, workers, resources)


def _run(job: "Job", decode: "Decode") -> None:
    """Decode the missing parts. Show a progress bar, and print a summary."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = sum(len(part.prompts) for part in job.parts.values())
    missing = sum(len(part.prompts) for part in job.missing())
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
    earlier = f" ({total - missing:,} were already complete)" if missing < total else ""
    typer.echo(
        f"{job.folder}: {total:,} prompts in {len(job.parts):,} files{earlier}; {num_tokens:,} new tokens in "
        f"{seconds:,.0f} s",
        err=True,
    )
