"""The valid prompts of `jspec batch`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import typer

from jspec.cli.common import UsageError
from jspec.cli.model_args import Sources, is_model
from jspec.cli.read_prompts import conversation

if TYPE_CHECKING:
    from jspec.cluster.batch.prompt_files import Entry
    from jspec.cluster.batch.worker import Decoding
    from jspec.core.tokenizer import Tokenizer
    from jspec.text.chat_template import Prompt

_MAX_ERRORS_SHOWN = 100
_MIN_LENGTH = 64


def valid_entries(
    entries: "Iterable[Entry]", where: Sources, decoding: "Decoding", chat: bool, skip_bad: bool
) -> "tuple[list[Entry], int]":
    """Return the valid entries, and a sequence length that fits all of them.

    Print the error of each invalid entry, but of at most 100 unless `skip_bad` is true.

    Args:
        chat: whether to turn text prompts into conversations.

    Raises:
        UsageError: `decoding` has template variables, but no entry is a conversation; or the draft does not support
            the longest sequence.
        ValueError: an entry is invalid and `skip_bad` is false, or no entry is valid.
    """
    from jspec.text.chat_template import is_conversation

    tokenizer, positions = where.tokenizer(), _positions(where.target)
    valid, longest, num_bad = list["Entry"](), 0, 0
    for entry in entries:
        try:
            entry, length = _validated(entry, tokenizer, decoding, chat, positions)
        except ValueError as error:
            num_bad += 1
            if num_bad <= _MAX_ERRORS_SHOWN or skip_bad:
                typer.echo(f"{'skipped: ' if skip_bad else ''}{error}", err=True)
        else:
            valid.append(entry)
            longest = max(longest, length)
    if num_bad and not (valid and skip_bad):
        advice = "correct at least one of them." if skip_bad else "correct them, or leave them out with --skip-bad."
        raise ValueError(f"{num_bad} of {num_bad + len(valid)} prompts are invalid; {advice}")
    if decoding.template and not any(is_conversation(cast("Prompt", entry.prompt)) for entry in valid):
        raise UsageError("--template applies only to conversations, and FILE has none; add --chat.")
    return valid, _padded_length(longest, positions, where)


def _positions(model: str) -> int:
    """Return the length of the longest sequence that the model supports, in tokens."""
    import convert

    return convert.read_config(convert.resolve(model)).max_position_embeddings


def _padded_length(longest: int, positions: int, where: Sources) -> int:
    """Round up the length of the longest sequence, so that other files usually reuse the compiled programs.

    Raises:
        UsageError: the draft model does not support the longest sequence.
    """
    from jspec.text.chat_template import bucket

    if is_model(where.draft) and where.head_kind is None:
        positions = min(positions, _positions(where.draft))
    if longest > positions:
        raise UsageError(
            f"The longest prompt and its completion need {longest} tokens, but the draft supports only {positions}; "
            "use another --draft, or a smaller --max-new-tokens."
        )
    return min(bucket(longest, _MIN_LENGTH), positions)


def _validated(
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
            f"{entry.place} needs {length} + {decoding.max_new_tokens} tokens (prompt + completion), but the target "
            f"supports only {positions}; shorten the prompt, or pass a smaller --max-new-tokens."
        )
    return entry._replace(prompt=prompt), length + decoding.max_new_tokens
