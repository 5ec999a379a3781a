"""A command's prompts, as text or as messages, from arguments, standard input or a JSON Lines file."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from jspec.cli.common import UsageError, check_text, check_texts

if TYPE_CHECKING:
    from jspec.text.chat_template import Message, Prompt


def gather(
    arguments: list[str] | None, file: Path | None, chat: bool, system: str | None, may_be_empty: bool
) -> "list[Prompt]":
    """Return the prompts in the form that `jspec.complete` accepts.

    Args:
        chat: whether to turn each text into a conversation with one user message.
        system: the system message to put before each conversation, including those in the file.
        may_be_empty: whether empty text is valid. See `check_text`.

    Raises:
        UsageError: there is no prompt, a prompt is not text, or the options cannot be combined.
        ValueError: the file is malformed; the message names the line.
    """
    if arguments and file:
        raise UsageError("There are prompts both as arguments and in --file; leave out one of the two.")
    if system is not None and not chat:
        raise UsageError("--system applies only to conversations; add --chat.")
    if file:
        prompts = _lines(file)
    elif arguments:
        prompts = arguments
        check_texts(prompts, "PROMPT", may_be_empty or chat)
    else:
        prompts = [_standard_input()]
    return [conversation(prompt, system) for prompt in prompts] if chat else cast("list[Prompt]", prompts)


def conversation(prompt: "Prompt", system: str | None) -> "list[Message]":
    """Return the prompt as a conversation, with `system` as its first message if it is not None."""
    messages = cast("list[Message]", [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    if system is None:
        return messages
    check_text(system, "--system")
    if messages[0]["role"] == "system":
        raise UsageError(
            "--system is set, but a conversation in --file has its own system message; leave out one of the two."
        )
    return [{"role": "system", "content": system}, *messages]


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise UsageError("There is no prompt; pass a prompt as an argument or on standard input.")
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not UTF-8 text (byte {error.start + 1}); convert it first.") from error
    if not text:
        raise UsageError("Standard input is empty; pass a prompt there, or as an argument.")
    check_text(text, "Standard input")
    return text


def _lines(file: Path) -> "list[Prompt]":
    """Return one prompt for each line of `file` that is not blank."""
    lines = file.read_bytes().split(b"\n")
    prompts = [_prompt(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f'{file} is empty; write a line such as {{"prompt": "Hello"}} for each prompt.')
    return prompts


def _prompt(line: bytes, place: str) -> "Prompt":
    from jspec.text.chat_template import check_conversation
    from jspec.text.json_lines import parse_object

    entry = parse_object(line, place)
    if entry.keys() == {"prompt"} and isinstance(entry["prompt"], str):
        check_text(entry["prompt"], place)
        return entry["prompt"]
    if entry.keys() == {"messages"} and isinstance(entry["messages"], list):
        messages = cast("list[Message]", entry["messages"])
        check_conversation(messages, place)
        for i, message in enumerate(messages):
            check_text(cast("str", message["content"]), f"{place}, message {i}")
        return messages
    raise ValueError(f'{place} must be {{"prompt": a text}} or {{"messages": a list of messages}}, and nothing else.')
