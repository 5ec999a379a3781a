# pyright: reportUnknownArgumentType=false
"""Encoding of prompts as one ragged batch: text, token ids, or conversations rendered by the model's chat template."""

import dataclasses
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard, cast

import numpy as np

from jspec.core.tokenizer import Tokenizer
from jspec.text.template_variables import check_variables

# Text, token ids, or a conversation whose messages have "role" and "content".
Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message]
ROLES = ("system", "user", "assistant", "tool")
LEAST_WIDTH = 32
_LEAST_NEW = 128
_LONGEST_REASON = 300  # characters to keep of a template's error, which may quote the whole conversation


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts in the form that `jspec.generate` accepts.

    There are few widths, so new prompts rarely cause recompilation.

    Attributes:
        tokens: ``int32[B, P]``, padded on the right. P is a power of two.
        lengths: ``int32[B]``, the number of tokens in each prompt.
    """

    tokens: np.ndarray
    lengths: np.ndarray


def listed(prompts: object) -> list[Prompt]:
    """Return a list of prompts. A single prompt (text, token ids or a conversation) becomes a list of one.

    Arrays count as lists.
    """
    rows = _plain(prompts)
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        return [cast("Prompt", rows)]
    rows = [_plain(one) for one in cast("Iterable[object]", rows)]
    alone = rows and all(isinstance(one, Mapping) or _is_id(one) for one in rows)
    return cast("list[Prompt]", [rows] if alone else rows)


def _plain(value: object) -> object:
    return np.asarray(value).tolist() if hasattr(value, "__array__") else value


def encode(
    tokenizer: Tokenizer | None, prompts: Sequence[Prompt], template: Mapping[str, object] | None = None
) -> Batch:
    """Encode `prompts` as one batch, whose width is a power of two. See `ids_of`."""
    rows = ids_of(tokenizer, prompts, template)
    width = bucket(max(map(len, rows)), LEAST_WIDTH)
    return Batch(padded(rows, width), np.array([len(ids) for ids in rows], np.int32))


def padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Return lists of token ids as ``int32[B, width]``, padded on the right with zeros."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens


def ids_of(
    tokenizer: Tokenizer | None, prompts: Sequence[Prompt], template: Mapping[str, object] | None = None
) -> list[list[int]]:
    """Return the token ids of each prompt.

    If the tokenizer adds a BOS token, every text prompt gets exactly one, even if it already starts with one. A
    conversation gets only the BOS that its template writes.

    Args:
        tokenizer: the model's tokenizer. It may be None if all prompts are token ids.
        template: chat-template variables for every conversation.

    Raises:
        ValueError: a prompt is invalid or has no tokens; a conversation is malformed, has no template, or its template
            fails; or `template` is malformed, or is passed although no prompt is a conversation. The error names the
            prompt, counted from 1, and the conversation's message, counted from 0.
    """
    variables = check_variables("template", template)
    if variables and not any(map(is_conversation, prompts)):
        raise ValueError("template sets chat-template variables, but no prompt is a conversation; leave template out.")
    several = len(prompts) > 1
    places = [f"Prompt {i}" if several else "The prompt" for i in range(1, len(prompts) + 1)]
    rows = [ids_of_prompt(tokenizer, prompt, place, variables) for prompt, place in zip(prompts, places, strict=True)]
    if not rows:
        raise ValueError("There are no prompts; pass at least one prompt.")
    return rows


def room(wanted: int, batch: Batch, positions: int) -> int:
    """Round up the `wanted` number of new tokens, so that other numbers reuse the compiled program.

    `max_tokens` sets the actual limit. The result is a power of two if the models have enough positions. Otherwise, it
    is the number of positions that remain after the padded prompts, or after the longest prompt. If too few positions
    remain, the result is `wanted`, so that the error message shows the number that the caller passed.
    """
    most = positions - int(batch.lengths.max())
    sizes = bucket(wanted, _LEAST_NEW), positions - batch.tokens.shape[1], most
    return next((size for size in sizes if wanted <= size <= most), wanted)


def is_conversation(prompt: Prompt) -> TypeGuard[Sequence[Message]]:
    """Return whether the prompt is a list of messages, whether or not they are well-formed."""
    return _is_list(prompt) and any(isinstance(one, Mapping) for one in prompt)


def check_conversation(messages: Sequence[Message], place: str) -> None:
    """Reject a conversation that a template would garble or silently drop, or that ends with an assistant message.

    Raises:
        ValueError: the conversation is rejected. The error names the message.
    """
    if not messages:
        raise ValueError(f"{place} has no messages; pass at least one message to answer.")
    check_messages(messages, place)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{place} ends with an assistant message; add a message to answer.")


def check_messages(messages: Sequence[object], place: str) -> None:
    """Check each message on its own, as part of `check_conversation`."""
    for i, message in enumerate(messages):
        fields: Message = cast("Message", message) if isinstance(message, Mapping) else {}
        if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
            raise ValueError(
                f"{place}, message {i} is {reprlib.repr(message)}; expected an object with two strings, "
                "'role' and 'content'."
            )
        if fields["role"] not in ROLES:
            raise ValueError(
                f"{place}, message {i} has the role {fields['role']!r}; expected one of {', '.join(ROLES)}."
            )


def ids_of_prompt(
    tokenizer: Tokenizer | None, prompt: Prompt, place: str, variables: Mapping[str, object]
) -> list[int]:
    """Return the token ids of one prompt. See `ids_of`.

    Args:
        place: the name of the prompt in errors.
        variables: chat-template variables, from `check_variables`.
    """
    if tokenizer is None and (isinstance(prompt, str) or is_conversation(prompt)):
        raise ValueError(f"{place} is not a list of token ids, but tokenizer is None; pass the target's tokenizer.")
    tokenizer = cast("Tokenizer", tokenizer)
    if isinstance(prompt, str):
        ids = ids_of_text(tokenizer, _checked(prompt, place))
    elif is_conversation(prompt):
        check_conversation(prompt, place)
        text = rendered(tokenizer, prompt, place, variables=variables)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    elif _is_list(prompt) and all(map(_is_id, prompt)):
        ids = [operator.index(i) for i in cast("Sequence[int]", prompt)]
        if far := [i for i in ids if not 0 <= i < 2**31]:
            raise ValueError(
                f"{place} has the id {far[0]}, outside any vocabulary; use ids from the model's tokenizer."
            )
    else:
        raise ValueError(
            f"{place} is {reprlib.repr(prompt)}; expected text, a list of token ids or a list of messages."
        )
    if not ids:
        raise ValueError(f"{place} is empty, and the tokenizer adds no start token; add some text.")
    return ids


def _checked(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} is not UTF-8 text (character {error.start + 1}); convert it first.") from error
    return text


def ids_of_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the text's ids, without the tokenizer's BOS if the text already has one, such as a chat template's."""
    ids, start = tokenizer(text, verbose=False)["input_ids"], tokenizer.bos_token_id
    if start is None or ids[:2] != [start, start]:
        return ids
    own = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids[1:] if own[:1] == [start] and ids[1 : len(own) + 1] == own else ids


def rendered(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    place: str,
    add_generation_prompt: bool = True,
    variables: Mapping[str, object] | None = None,
) -> str:
    """Return the messages rendered by the chat template.

    Args:
        add_generation_prompt: whether to append the text that starts an answer.
        variables: template variables, from `check_variables`.

    Raises:
        ValueError: there is no template, or it rejects the messages, fails, or returns text that is not valid UTF-8.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{place} is a conversation, but the tokenizer has no chat template; use a chat model, or pass plain text."
        )
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **(variables or {})}
    try:
        text = tokenizer.apply_chat_template(cast("list[dict[str, Any]]", list(messages)), **options)
    except Exception as error:  # a template is a program, which can fail in any way
        raise ValueError(f"{place} is rejected by the model's chat template: {_reason(error)}") from error
    return _checked(text, place)


def _reason(error: Exception) -> str:
    """Return one line about a template error, with its class name unless the template itself raised the error."""
    from jinja2 import TemplateError

    words = " ".join(str(error).split())
    words = words if len(words) < _LONGEST_REASON else f"{words[:_LONGEST_REASON]}..."
    return words if words and isinstance(error, TemplateError) else f"{type(error).__name__} {words}".strip()


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def bucket(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())
