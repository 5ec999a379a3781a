"""`jspec chat`: a conversation in the terminal."""

import dataclasses
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from jspec.cli import interrupts
from jspec.cli import line_input as lines
from jspec.cli import options as o
from jspec.cli.common import (
    UsageError,
    check_text,
    chosen_sampling,
    option,
    status_line,
    template_variables,
    wrong_options,
)
from jspec.cli.engine_args import compile_all, engine_of
from jspec.cli.model_args import sources

if TYPE_CHECKING:
    from jspec.core.sampling import SamplingParams
    from jspec.core.tokenizer import Tokenizer
    from jspec.drafters.base import DraftSource
    from jspec.engine import Engine
    from jspec.generation.complete import Completion
    from jspec.text.chat_template import Message, Prompt

    _LengthOf: TypeAlias = Callable[[DraftSource], object]
_DEFAULT_PAIR = "smollm2"
_MaxLength = Annotated[
    int | None,
    option("--max-length", "N", "Longest conversation, in tokens.", min=2, show_default="1024, or the models' limit"),
]


def chat(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Path, model name, Hugging Face repo id or org/repo:file.gguf [default: smollm2 if it is on this "
            "machine, else the bundled target].",
        ),
    ] = None,
    tokenizer_source: o.Tokenizer = None,
    draft: o.Draft = None,
    plain: o.Plain = False,
    dtype: o.Dtype = None,
    quantize: o.Quantize = None,
    draft_quantize: o.DraftQuantize = None,
    activation_bits: o.ActivationBits = "24",
    system: Annotated[str | None, option("--system", "TEXT", "System message, placed first.")] = None,
    template: o.Template = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    seed: o.Seed = 0,
    max_new_tokens: Annotated[
        int, option("--max-new-tokens -n", "N", "Maximum number of new tokens per answer.", min=1, max=2**31 - 1)
    ] = 512,
    num_draft_tokens: Annotated[
        Any,
        option(
            "--num-draft-tokens",
            "N",
            "Draft tokens per round; auto: as many as pay off.",
            parser=o.length,
            show_default="4; auto with lookup+SRC",
        ),
    ] = None,
    max_length: _MaxLength = None,
) -> None:
    """Talk with a model: every line is a message, and the answer is shown while it is decoded.

    Ctrl-C stops an answer. Between answers it ends the conversation, as Ctrl-D does.

    Answers go to standard output. On a terminal, colours show each token's origin. Statistics go to standard
    error. With the same --seed, the same messages get the same answers, whatever the draft is.
    """
    if top_p == 0:
        raise UsageError("--top-p must be above 0; 1 is off.")
    if system is not None:
        check_text(system, "--system")
    variables = template_variables(template or [])
    where = sources(_target(target), draft, plain, tokenizer_source)
    precision = where.precision(dtype, quantize, draft_quantize, activation_bits)
    if num_draft_tokens is not None and not where.drafts:
        raise UsageError("--plain (or --draft none) decodes without a draft; leave out --num-draft-tokens.")
    with status_line() as set_status:
        from jspec.generation.complete import engine_draft_length

        draft_length: _LengthOf = engine_draft_length if num_draft_tokens is None else lambda _: num_draft_tokens
        engine, tokenizer = engine_of(where, set_status, precision, draft_length, max_length, slots=1)
        if tokenizer.chat_template is None and (system is not None or variables):
            name = "--template" if system is None else "--system"
            raise UsageError(f"{name} needs a chat template, but this model has none; leave out {name}.")
        compile_all(engine, set_status)
    sampling = chosen_sampling(engine.target, temperature, top_k, top_p, min_p, repetition_penalty)
    with lines.whole_lines():
        _talk(Conversation(engine, tokenizer, sampling, seed, max_new_tokens, system, variables))


def _target(target: str | None) -> str | None:
    """Return the target. If none is given, return a chat model that is available locally, or None."""
    from convert import hub_names as names

    if target is None and names.find(_DEFAULT_PAIR) is not None:
        return _DEFAULT_PAIR
    if target is None:
        typer.echo(
            "The bundled pair only continues Python source. To get a small model that answers: "
            f"{names.MODELS[_DEFAULT_PAIR].command}",
            err=True,
        )
    return target


class Conversation:
    """The messages so far, and the engine that answers them and keeps them prefilled.

    Without a chat template, the conversation is a single text, and each message is its next line.
    """

    def __init__(
        self,
        engine: "Engine",
        tokenizer: "Tokenizer",
        sampling: "SamplingParams",
        seed: int,
        max_new_tokens: int,
        system: str | None,
        template: dict[str, object] | None = None,
    ):
        self._template = template
        self._engine, self._tokenizer, self._sampling, self._seed = engine, tokenizer, sampling, seed
        self._most, self._text, self._turns = max_new_tokens, "", 0
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, message: str) -> Generator["Completion"]:
        """Yield the answer in parts. The answer becomes part of the conversation, even if it is cut off.

        Raises:
            UsageError: the message no longer fits, or the chat template rejects it. The message is then not added to
                the conversation.
        """
        from jspec.engine import Request
        from jspec.generation.complete import prepare
        from jspec.generation.stream import parts
        from jspec.text import request_keys

        said = [*self._messages, {"role": "user", "content": message}]
        text = self._text + message
        with wrong_options():
            prompt: Prompt = text if self._tokenizer.chat_template is None else said
            task = prepare(self._tokenizer, [prompt], template=self._template)
        target, longest = self._engine.target, self._engine.sizes.length
        room = longest - len(task.rows[0])
        if room <= 0:
            raise UsageError(
                f"The conversation has {len(task.rows[0])} tokens, which leaves no room for an answer within the "
                f"maximum of {longest}; shorten the message, start a new conversation, or set a larger --max-length."
            )
        (key,), self._turns = request_keys(self._seed, 1, first=self._turns), self._turns + 1
        request = Request(task.rows[0], min(self._most, room), self._sampling, key, task.ends(target))
        answer = ""
        try:
            for part in parts(target, task, request, self._engine.stream_sync(request)):
                answer += part.text
                yield part
        finally:
            self._messages, self._text = [*said, {"role": "assistant", "content": answer}], f"{text}{answer}\n"


def _talk(conversation: Conversation) -> None:
    asks = sys.stdin.isatty()
    while True:
        try:
            line = lines.read("> ")
            if not line:
                return typer.echo("", err=True) if asks else None
            if line.strip():
                check_text(line, "The message")
                _show(conversation.answer(line.rstrip("\n")))
        except UnicodeDecodeError as error:
            raise UsageError(f"The message is not UTF-8 text (byte {error.start + 1}); convert it first.") from error
        except UsageError as error:
            if not asks:
                raise
            typer.echo(str(error), err=True)


def _show(answer: Generator["Completion"]) -> None:
    """Print parts as they arrive, until the answer ends or the user presses Ctrl-C. Then print the statistics."""
    from rich.console import Console

    from jspec.cli import report

    screen, figures = Console(highlight=False), Console(stderr=True, highlight=False)
    coloured, part, began = screen.is_terminal and screen.color_system is not None, None, time.perf_counter()
    with interrupts.heard() as stopped:
        for part in answer:
            if coloured:
                screen.print(report.by_origin(part), end="", soft_wrap=True)
            else:
                typer.echo(report.visible(part.text) if screen.is_terminal else part.text, nl=False)
            if stopped.is_set() and part.finish_reason is None:
                part = dataclasses.replace(part, finish_reason="stopped")
                break
    answer.close()
    typer.echo("")
    if part is not None:
        figures.print(report.sentence(part, time.perf_counter() - began), end="\n\n", style="dim", soft_wrap=True)
