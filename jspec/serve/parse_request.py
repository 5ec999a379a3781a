"""Conversion of a request body into engine requests with token-id prompts, sampling parameters, keys and end tokens."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jspec.core.sampling import SamplingParams
from jspec.core.tokenizer import Tokenizer
from jspec.engine import Request
from jspec.engine.constraints import Constraint
from jspec.engine.grammars import Grammars
from jspec.generation.complete import prepare
from jspec.models.language_model import HasConfig
from jspec.models.sampling_defaults import default_sampling
from jspec.serve.backend import Backend
from jspec.serve.chat_prompt import chat_prompt, prompt_texts
from jspec.serve.chat_schemas import ChatBody, Conversation
from jspec.serve.errors import wrong
from jspec.serve.schemas import Body, CompletionBody
from jspec.serve.token_text import Names
from jspec.serve.tools.detect import ToolSupport
from jspec.serve.tools.tool_format import Reply, ToolFormat
from jspec.serve.tools.tool_grammar import marker_ids, text_ids
from jspec.text import eos_ids

_NO_SEED = -1  # as in other servers
_WORD = 2**32 - 1
_LEAST_TOP_P = 1e-6  # replaces 0: only the most likely token remains, as OpenAI clients expect


@dataclasses.dataclass(frozen=True)
class Served:
    """The served model.

    Attributes:
        name: the name that clients use.
        engine: the engine that decodes.
        tokenizer: the target's tokenizer.
        names: the token names.
        grammars: the factory of output constraints; None if the tokenizer does not expose its internals, or if the
            model has no EOS.
        tool_support: how the model represents tools and calls; None if it has no chat template.
    """

    name: str
    engine: Backend
    tokenizer: Tokenizer
    names: Names
    grammars: Grammars | None
    tool_support: ToolSupport | None

    @functools.cached_property
    def marker_ids(self) -> dict[str, int]:
        """The ids of the tokens that delimit calls, by text."""
        form = None if self.tool_support is None else self.tool_support.format
        return {} if form is None else marker_ids(form, self.tokenizer)

    @functools.cached_property
    def text_ids(self) -> tuple[int, ...]:
        """The added tokens that decoded text shows and that do not delimit calls."""
        form = None if self.tool_support is None else self.tool_support.format
        return () if form is None else text_ids(form, self.tokenizer)

    @functools.cached_property
    def hidden_marker_texts(self) -> dict[int, str]:
        """The texts of the call delimiters that decoded text does not show, by token id."""
        return {i: text for text, i in self.marker_ids.items() if self.names.is_special(i)}

    @property
    def target(self) -> HasConfig:
        """The target model, whose distribution the output follows."""
        return self.engine.target

    @property
    def max_length(self) -> int:
        """The maximum sequence length in tokens, including the prompt."""
        return self.engine.sizes.length

    @property
    def num_draft_tokens(self) -> int:
        """The largest number of draft tokens, K."""
        return self.engine.sizes.num_draft_tokens[-1]


@dataclasses.dataclass(frozen=True)
class CallParser:
    """A parser of the function calls in an output.

    Attributes:
        format: the call notation.
        names: the functions that may be called.
        markers: the texts of the call delimiters that decoded text does not show, by token id.
        is_only: whether the output consists only of calls. Any other text is then the start of a call that was cut off.
    """

    format: ToolFormat
    names: frozenset[str]
    markers: dict[int, str]
    is_only: bool

    def parse(self, text: str, is_complete: bool) -> Reply:
        """Split the text so far into content and calls."""
        reply = self.format.parse(text, self.names, is_complete)
        return Reply("", reply.calls, (0,) * len(reply.calls)) if self.is_only else reply


@dataclasses.dataclass(frozen=True)
class ParsedRequest:
    """A parsed request body.

    Attributes:
        body: the body as received.
        prompts: the token ids of each prompt.
        requests: the engine requests, of which n consecutive ones belong to each prompt.
        max_tokens: the maximum number of tokens in a choice. 0 means that only the prompt is echoed, although the
            engine still decodes one token.
        top: the number of most likely tokens to list for each token; None for no log-probabilities.
        stop: the stop strings.
        ends: the tokens that end the output, each with its stop reason: a string, an id, or None for one of the model's
            own end tokens.
        call_parser: the parser of function calls in the output; None if the output is only text.
    """

    body: Body
    prompts: list[tuple[int, ...]]
    requests: list[Request]
    max_tokens: int | None
    top: int | None
    stop: tuple[str, ...]
    ends: dict[int, str | int | None]
    call_parser: CallParser | None = None

    @property
    def given_prompts(self) -> Sequence[str | list[int]]:
        """The prompts of a completion request, as received; empty for a chat request."""
        return self.body.prompt if isinstance(self.body, CompletionBody) else ()

    @property
    def echoes(self) -> bool:
        """Whether the response repeats the prompts."""
        return isinstance(self.body, CompletionBody) and self.body.echo


def parse_request(served: Served, body: Body, constraint: Constraint | None = None) -> ParsedRequest:
    """Parse the parts of a body that depend on the model's tokenizer or sizes. `constraint` is already compiled.

    Raises:
        Refusal: the body has an invalid field.
    """
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    stop, ends = _ends(served, body)
    prompts = _prompts(served, body)
    for prompt in prompts:
        _check(served, body, prompt, param)
    common = _sampling(served, body), constraint
    each = [prompt for prompt in prompts for _ in range(body.n)]
    requests = [_request(served, body, prompt, ends, index, *common) for index, prompt in enumerate(each)]
    return ParsedRequest(body, prompts, requests, body.max_tokens, _top(body), stop, ends, _call_parser(served, body))


def number_of_choices(body: Body) -> int:
    """Return the number of engine requests that a body needs."""
    return body.n * (len(body.prompt) if isinstance(body, CompletionBody) else 1)


def _prompts(served: Served, body: Body) -> list[tuple[int, ...]]:
    if isinstance(body, ChatBody):
        return [tuple(chat_ids(served, body))]
    assert isinstance(body, CompletionBody)
    check_characters(served, [prompt for prompt in body.prompt if isinstance(prompt, str)], "prompt")
    _check_ids(served, [prompt for prompt in body.prompt if not isinstance(prompt, str)], "prompt")
    try:
        batch = prepare(served.tokenizer, list(body.prompt)).batch
    except ValueError as error:
        raise wrong(str(error), "prompt") from None
    return [tuple(row[:length].tolist()) for row, length in zip(batch.tokens, batch.lengths, strict=True)]


def chat_ids(served: Served, body: Conversation) -> list[int]:
    """Return the token ids of a chat's prompt.

    Raises:
        Refusal: the messages are too long, or the chat template rejects them.
    """
    for param, text in prompt_texts(body).items():
        check_characters(served, [text], param)
    return chat_prompt(served.tokenizer, served.tool_support, body)


def _call_parser(served: Served, body: Body) -> CallParser | None:
    if not isinstance(body, ChatBody) or not body.may_call:
        return None
    names = frozenset(tool.function.name for tool in body.callable_tools)
    return CallParser(call_format(served, body), names, served.hidden_marker_texts, body.must_call)


def call_format(served: Served, body: ChatBody) -> ToolFormat:
    """Return the notation in which the model writes calls.

    Raises:
        Refusal: the model has no chat template, or its call notation is not supported.
    """
    if served.tool_support is None:
        raise wrong("The conversation needs a chat template, but the model has none; use a chat model.", "messages")
    if served.tool_support.format is None:
        raise wrong(
            "tools is not supported with this model: its chat template writes calls in a notation that this server "
            "does not support; omit this field.",
            "tools",
            "unsupported",
        )
    return served.tool_support.format


def check_characters(served: Served, texts: Sequence[str], param: str) -> None:
    """Reject text that is too long before tokenizing it, which might take several seconds.

    Raises:
        Refusal: a text is too long.
    """
    if (longest := max(map(len, texts), default=0)) > served.max_length * served.names.longest:
        raise wrong(
            f"There are {longest} characters in {param}, too many for the {served.max_length} tokens that prompt and "
            "output may have in total; shorten the text.",
            param,
            "context_length_exceeded",
        )


def _check_ids(served: Served, prompts: Sequence[Sequence[int]], param: str) -> None:
    """Reject token-id prompts that are too long."""
    if (longest := max(map(len, prompts), default=0)) >= served.max_length:
        raise wrong(
            f"There are {longest} tokens in {param}, but prompt and output may have at most {served.max_length} in "
            "total; shorten the prompt.",
            param,
            "context_length_exceeded",
        )


def _ends(served: Served, body: Body) -> tuple[tuple[str, ...], dict[int, str | int | None]]:
    """Return the stop strings and the tokens that end the output, each token with its stop reason."""
    try:
        task = prepare(served.tokenizer, [[0]], list(dict.fromkeys(body.stop)))
    except ValueError as error:
        raise wrong(str(error), "stop") from None
    vocab_size = served.target.config.vocab_size
    if out_of_vocab := [i for i in body.stop_token_ids if i >= vocab_size]:
        raise wrong(
            f"stop_token_ids holds {out_of_vocab[0]}, outside the vocabulary of {vocab_size} tokens.",
            "stop_token_ids",
        )
    special = [text for text in dict.fromkeys(body.stop) if text not in task.stop]
    ends: dict[int, str | int | None] = {i: i for i in body.stop_token_ids}
    ends |= {i: text for i, text in zip(task.stop_ids, special, strict=True) if i < vocab_size}
    own = () if body.ignore_eos else eos_ids(served.target, served.tokenizer)
    ends |= dict.fromkeys(own)
    most = served.engine.sizes.eos_ids
    if len(ends) > most:
        raise wrong(
            f"{len(ends)} tokens may end the output, including the model's own, but this server supports at most "
            f"{most}; send fewer stop_token_ids.",
            "stop_token_ids",
        )
    return task.stop, ends


def _check(served: Served, body: Body, prompt: tuple[int, ...], param: str) -> None:
    vocab_size, longest = served.target.config.vocab_size, served.max_length
    if max(prompt) >= vocab_size:
        raise wrong(f"{param} holds the id {max(prompt)}, outside the vocabulary of {vocab_size} tokens.", param)
    _check_ids(served, [prompt], param)
    if len(prompt) + body.min_tokens > longest:
        raise wrong(
            f"The {param} ({len(prompt)} tokens) and min_tokens ({body.min_tokens}) exceed the {longest} tokens that "
            "prompt and output may have in total; reduce one of the two.",
            "min_tokens",
            "context_length_exceeded",
        )


def _request(
    served: Served,
    body: Body,
    prompt: tuple[int, ...],
    ends: Iterable[int],
    index: int,
    sampling: SamplingParams,
    constraint: Constraint | None,
) -> Request:
    remaining = served.max_length - len(prompt)
    key = None if body.seed in (None, _NO_SEED) else jax.random.fold_in(_seed_key(body.seed), index)
    of_prompt = isinstance(body, CompletionBody) and body.echo and body.logprobs is not None
    return Request(
        prompt,
        remaining if body.max_tokens is None else min(remaining, max(1, body.max_tokens)),
        sampling,
        key,
        tuple(sorted(ends)),
        body.cache_salt,
        _top(body) or 0,
        of_prompt,
        constraint,
    )


def _seed_key(seed: int) -> Array:
    """Return the key of a 64-bit seed, whatever JAX's settings are. Negative seeds are in two's complement."""
    words = np.array([seed >> 32 & _WORD, seed & _WORD], np.uint32)
    return cast(Array, jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32"))


def _sampling(served: Served, body: Body) -> SamplingParams:
    """Return the body's sampling parameters, with the model's recommended defaults for those that it omits."""
    return default_sampling(
        served.target,
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=None if body.top_p is None else max(body.top_p, _LEAST_TOP_P),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_bias(body.logit_bias, served.target.config.vocab_size) if body.logit_bias else None,
        min_tokens=body.min_tokens,
    )


def _bias(given: dict[str, float], vocab_size: int) -> np.ndarray:
    bias = np.zeros(vocab_size, np.float32)
    for name, value in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < vocab_size):
            raise wrong(f"logit_bias has the key {name!r}; expected a token id below {vocab_size}.", "logit_bias")
        bias[int(name)] = value
    return bias


def _top(body: Body) -> int | None:
    if isinstance(body, ChatBody):
        return body.top_logprobs if body.logprobs else None
    return body.logprobs if isinstance(body, CompletionBody) else None
