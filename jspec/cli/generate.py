"""`jspec generate`: continue prompts, or answer them."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import typer

from jspec.cli import options as o
from jspec.cli.common import (
    UsageError,
    check_texts,
    chosen_sampling,
    status_line,
    template_variables,
    timed,
    wrong_options,
)
from jspec.cli.model_args import Sources, sources
from jspec.cli.printing import choice_of_auto, print_json, print_text
from jspec.cli.read_prompts import gather

if TYPE_CHECKING:
    from jspec.core.sampling import SamplingParams
    from jspec.core.tokenizer import Tokenizer
    from jspec.core.types import Output
    from jspec.drafters.base import DraftSource
    from jspec.generation.complete import Task
    from jspec.models.llama import Llama
    from jspec.text.chat_template import Prompt

EPILOG = """\b
With --json, each prompt produces one line, an object with these fields:
  prompt, text      the prompt as passed (text or messages); the generated text
  tokens, logprobs  one entry for each new token; natural log of its probability
                    under the distribution it was sampled from
  origins           for each token "accepted", "corrected", "bonus" (always so
                    with --plain) or "no draft" (there was nothing to verify)
  finish_reason     "eos", "stop" or "length"
  num_draft_tokens  maximum number of draft tokens per round; with auto, the
                    chosen number; 0 is plain decoding
  stats             counts of everything decoded, even after a --stop: tokens,
                    rounds, drafted, judged, accepted, accepted_at (by position in
                    the draft), acceptance_rate (accepted over judged),
                    tokens_per_round, predicted_tokens_per_round (from that rate)
  times             seconds for all prompts together: import (of libraries), load
                    (of models), compile (and measure, with --num-draft-tokens
                    auto), run;
                    tokens_per_second: for this prompt

\b
Compiled programs are kept in ~/.cache/jspec/xla, or in JAX_COMPILATION_CACHE_DIR.
"""


def generate(
    prompts: o.Prompts = None,
    file: o.File = None,
    chat: o.Chat = False,
    system: o.System = None,
    target: o.Target = None,
    tokenizer_source: o.Tokenizer = None,
    draft: o.Draft = None,
    plain: o.Plain = False,
    dtype: o.Dtype = None,
    quantize: o.Quantize = None,
    draft_quantize: o.DraftQuantize = None,
    activation_bits: o.ActivationBits = "24",
    template: o.Template = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    seed: o.Seed = 0,
    max_new_tokens: o.MaxNewTokens = 128,
    stop: o.Stop = None,
    num_draft_tokens: o.NumDraftTokens = None,
    tree: o.Tree = None,
    accept: o.Accept = None,
    show: o.Show = False,
    as_json: o.Json = False,
) -> None:
    """Continue or answer all PROMPTs as one batch. Without a PROMPT, all of standard input is the prompt.

    Put -- before prompts if one begins with a dash.

    The text goes to standard output. On a terminal, colours show each token's origin. Statistics go to
    standard error.
    """
    check_texts(stop := stop or [], "--stop", may_be_empty=False)
    where = sources(target, draft, plain, tokenizer_source)
    precision = where.precision(dtype, quantize, draft_quantize, activation_bits)
    _check(top_p, show, as_json)
    drafting = _drafting(where, num_draft_tokens, tree, accept, show)
    inputs = gather(prompts, file, chat, system, may_be_empty=target is not None)
    variables = _variables(template, inputs)
    times: dict[str, float] = {}
    if num_draft_tokens == "auto":
        typer.echo("auto: measuring for a minute or more; to skip, run `jspec tune` once and pass its number", err=True)
    with status_line() as set_status:
        with timed(times, "import"):
            import jspec
            from jspec.generation import complete as completion
        set_status("Loading")
        with timed(times, "load"):
            tokenizer = where.tokenizer()
            with wrong_options():
                task = completion.prepare(tokenizer, inputs, stop, variables)
            models = where.load(precision)
        if tree:
            models = models[0], jspec.TreeDrafter(cast("DraftSource", models[1]), jspec.Tree(tree))
        elif where.drafts:
            drafting["num_draft_tokens"] = completion.draft_length_of(cast("DraftSource", models[1]), num_draft_tokens)
        sampling = chosen_sampling(models[0], temperature, top_k, top_p, min_p, repetition_penalty)
        out = _decode(task, models, max_new_tokens, sampling, seed, drafting, times, set_status)
    completions, chosen_length = task.completions(models[0], out), out.stats.accepted_at.shape[1]
    if as_json:
        print_json(completions, chosen_length, times)
    elif show:
        for row in range(len(completions)):
            out.show(task.tokenizer, row)
    else:
        print_text(completions, times, by_origin=where.drafts)
    if num_draft_tokens == "auto" and not as_json:
        typer.echo(choice_of_auto(chosen_length), err=True)
    _suggest_chat(task.tokenizer, is_answered=chat or file is not None)


def _suggest_chat(tokenizer: "Tokenizer", is_answered: bool) -> None:
    if not is_answered and tokenizer.chat_template is not None:
        typer.echo("This is a chat model; add --chat to get an answer instead of a continuation.", err=True)


def _check(top_p: float | None, show: bool, as_json: bool) -> None:
    """Check the options that typer cannot check."""
    if top_p == 0:
        raise UsageError("--top-p must be above 0; 1 is off.")
    if show and as_json:
        raise UsageError("--show and --json select different output formats; leave out one of the two.")


def _variables(template: list[str] | None, inputs: "list[Prompt]") -> dict[str, object]:
    """Return the chat template variables, which are valid only for conversations."""
    variables = template_variables(template or [])
    if variables and not any(isinstance(prompt, list) for prompt in inputs):
        raise UsageError("--template applies only to conversations; add --chat.")
    return variables


def _drafting(
    where: Sources, num_draft_tokens: int | str | None, tree: tuple[int, ...] | None, accept: str | None, show: bool
) -> dict[str, Any]:
    """Return the drafting options, which are invalid without a draft."""
    options: dict[str, Any] = {
        "num_draft_tokens": num_draft_tokens,
        "tree": tree,
        "accept": accept,
        "show": show or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if options and not where.drafts:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in options)
        raise UsageError(f"--plain (or --draft none) decodes without a draft; leave out {names}.")
    if options.pop("show", None):
        options["record"] = True
    if options.pop("tree", None):
        if num_draft_tokens is not None:
            raise UsageError("--tree already sets the draft tokens per round; leave out --num-draft-tokens.")
        if not where.can_branch:
            raise UsageError(
                f"--tree needs a draft that can branch: a model, a head, a datastore or exit:N; {where.name} cannot."
                + (" Leave out lookup+, or use --draft head." if where.looks_up else "")
            )
    return options


def _decode(
    task: "Task",
    models: "tuple[Llama, DraftSource | None]",
    max_new_tokens: int,
    sampling: "SamplingParams",
    seed: int,
    drafting: dict[str, Any],
    times: dict[str, float],
    set_status: Callable[[str], None],
) -> "Output":
    """Decode twice. The first run compiles and decodes one token, so that the second run only decodes."""
    import jax

    def run(name: str, sampling: "SamplingParams") -> "Output":
        with timed(times, name):
            return jax.device_get(task.decode(*models, max_new_tokens, sampling, seed, **drafting))

    task.check_length(*models, max_new_tokens)  # the run that compiles requests one token, which always fits
    set_status("Compiling (cached for the next run)")
    run("compile", dataclasses.replace(sampling, max_tokens=1))
    set_status("Decoding")
    return run("run", sampling)
