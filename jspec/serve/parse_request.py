"""Conversion of a request body into engine requests with token-id prompts, sampling parameters, keys and end tokens."""

import dataclasses
import json
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from jspec.core.sampling import SamplingParams
from jspec.core.tokenizer import Tokenizer
from jspec.engine import Engine, Request
from jspec.engine.constraints import Constraint
from jspec.engine.grammars import Grammars
from jspec.generation.complete import prepare
from jspec.models.language_model import LanguageModel
from jspec.models.sampling_defaults import default_sampling
from jspec.serve.errors import wrong
from jspec.serve.schemas import Body, ChatBody, CompletionBody
from jspec.serve.token_text import Names
from jspec.text import eos_ids
from jspec.text.chat_template import Prompt
from jspec.text.template_variables import check_variables


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
    """

    name: str
    engine: Engine
    tokenizer: Tokenizer
    names: Names
    grammars: Grammars | None

    @property
    def target(self) -> LanguageModel:
        """The target model, whose distribution the output follows."""
        return self.engine.device.target

    @property
    def max_length(self) -> int:
        """The maximum sequence length in tokens, including the prompt."""
        return self.engine.device.sizes.length

    @property
    def num_draft_tokens(self) -> int:
        """The largest number of draft tokens, K."""
        return self.engine.device.sizes.num_draft_tokens[-1]


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
    """

    body: Body
    prompts: list[tuple[int, ...]]
    requests: list[Request]
    max_tokens: int | None
    top: int | None
    stop: tuple[str, ...]
    ends: dict[int, str | int | None]

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
    prompts = _prompts(served, body, param)
    for prompt in prompts:
        _check(served, body, prompt, param)
    common = _sampling(served, body), constraint
    each = [prompt for prompt in prompts for _ in range(body.n)]
    requests = [_request(served, body, prompt, ends, index, *common) for index, prompt in enumerate(each)]
    return ParsedRequest(body, prompts, requests, body.max_tokens, _top(body), stop, ends)


def number_of_choices(body: Body) -> int:
    """Return the number of engine requests that a body needs."""
    return body.n * (len(body.prompt) if isinstance(body, CompletionBody) else 1)


def _prompts(served: Served, body: Body, param: str) -> list[tuple[int, ...]]:
    prompts: Sequence[Prompt] = body.prompt if isinstance(body, CompletionBody) else []
    texts = [one for one in prompts if isinstance(one, str)]
    if isinstance(body, ChatBody):
        messages = [one.plain() for one in body.messages]
        prompts, texts = [messages], ["".join(one["content"] for one in messages)]
    _check_characters(served, texts, param)
    if isinstance(body, CompletionBody):
        _check_ids(served, [one for one in body.prompt if not isinstance(one, str)], param)
    template = _template(served, body)
    try:
        batch = prepare(served.tokenizer, list(prompts), template=template).batch
    except ValueError as error:
        raise wrong(str(error), param) from None
    except Exception as error:  # a template can fail in any way
        raise wrong(f"The {param} cannot be prepared for this model: {' '.join(str(error).split())}.", param) from error
    return [tuple(row[:length].tolist()) for row, length in zip(batch.tokens, batch.lengths, strict=True)]


def _template(served: Served, body: Body) -> dict[str, object]:
    """Return a chat's template variables. The maximum sequence length limits their size, as it does for messages."""
    name, given = "chat_template_kwargs", body.chat_template_kwargs if isinstance(body, ChatBody) else {}
    try:
        _check_characters(served, [json.dumps(given, ensure_ascii=False)], name)
        return check_variables(name, given, reserved=("tools",))
    except RecursionError:
        raise wrong(f"{name} is nested too deeply.", name) from None
    except ValueError as error:
        raise wrong(str(error), name) from None


def _check_characters(served: Served, texts: Sequence[str], param: str) -> None:
    """Reject text that is too long before tokenizing it, which might take several seconds."""
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
    if far := [i for i in body.stop_token_ids if i >= vocab_size]:
        raise wrong(f"stop_token_ids holds {far[0]}, outside the vocabulary of {vocab_size} tokens.", "stop_token_ids")
    special = [one for one in dict.fromkeys(body.stop) if one not in task.stop]
    ends: dict[int, str | int | None] = {i: i for i in body.stop_token_ids}
    ends |= {i: one for i, one in zip(task.stop_ids, special, strict=True) if i < vocab_size}
    own = () if body.ignore_eos else eos_ids(served.target, served.tokenizer)
    ends |= dict.fromkeys(own)
    most = served.engine.device.sizes.eos_ids
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
    if len(prompt) + (body.max_tokens or 1) > longest:
        is_new = isinstance(body, ChatBody) and body.max_completion_tokens is not None
        limit = "max_completion_tokens" if is_new else "max_tokens"
        blamed = limit if limit in body.model_fields_set else param
        raise wrong(
            f"The {param} ({len(prompt)} tokens) and {limit} ({body.max_tokens}) exceed the {longest} tokens that "
            "prompt and output may have in total; reduce one of the two.",
            blamed,
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
    room = served.max_length - len(prompt)
    key = None
    if body.seed is not None:  # a fixed key type, so that a seed gives the same text whatever JAX's default is
        key = jax.random.fold_in(jax.random.key(body.seed, impl="threefry2x32"), index)
    of_prompt = isinstance(body, CompletionBody) and body.echo and body.logprobs is not None
    return Request(
        prompt,
        room if body.max_tokens is None else max(1, body.max_tokens),
        sampling,
        key,
        tuple(sorted(ends)),
        body.cache_salt,
        _top(body) or 0,
        of_prompt,
        constraint,
    )


def _sampling(served: Served, body: Body) -> SamplingParams:
    """Return the body's sampling parameters, with the model's recommended defaults for those that it omits."""
    return default_sampling(
        served.target,
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
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
