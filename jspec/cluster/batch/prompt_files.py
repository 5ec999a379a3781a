"""Files of prompts, in JSON Lines or Parquet, and the files that repeat their rows with the completions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from jspec.cluster.batch.arrow_tables import parquet_bytes, prompt_columns, read_parquet, with_completions
from jspec.cluster.batch.completed import COLUMNS, Completed
from jspec.text.chat_template import Message, Prompt, check_conversation
from jspec.text.json_lines import parse_object

_EXPECTED = 'expected either "prompt", a text, or "messages", a list of messages'


class Entry(NamedTuple):
    """A prompt and its place in the file.

    Attributes:
        prompt_index: the number of prompts before it.
        place: the line or row, for error messages.
        prompt: the prompt, or a sentence that says why there is none.
    """

    prompt_index: int
    place: str
    prompt: Prompt | ValueError


class PromptFile(Protocol):
    """A file of prompts.

    Attributes:
        suffix: the suffix of the files that `part` returns.
    """

    suffix: str

    def entries(self) -> Iterator[Entry]:
        """Yield the entries in order."""
        ...

    def part(self, indices: Sequence[int], completed: Sequence[Completed]) -> bytes:
        """Return a file with the rows at `indices`, each with its completion in additional columns."""
        ...


class JsonLinesFile:
    """A file with one JSON object per line. Blank lines are ignored."""

    suffix = ".jsonl"

    def __init__(self, path: Path):
        numbered = enumerate(path.read_bytes().split(b"\n"), 1)
        self._lines = [(f"{path}, line {number}", line) for number, line in numbered if line.strip()]

    def entries(self) -> Iterator[Entry]:
        """Yield the prompts in order."""
        for index, (place, line) in enumerate(self._lines):
            try:
                prompt = _prompt(parse_object(line, place), place)
            except ValueError as error:
                prompt = error
            yield Entry(index, place, prompt)

    def part(self, indices: Sequence[int], completed: Sequence[Completed]) -> bytes:
        """Return the lines at `indices`, with completions."""
        objects = (parse_object(line, place) for place, line in (self._lines[i] for i in indices))
        pairs = zip(objects, completed, strict=True)
        lines = [json.dumps({**columns, **one}, ensure_ascii=False, allow_nan=False) for columns, one in pairs]
        return "".join(f"{line}\n" for line in lines).encode()


class ParquetFile:
    """A Parquet file with a column "prompt" or "messages"."""

    suffix = ".parquet"

    def __init__(self, path: Path):
        self._table, self._path = read_parquet(path), path

    def entries(self) -> Iterator[Entry]:
        """Yield the prompts in order."""
        nothing = dict.fromkeys(self._table.column_names)
        for index, row in enumerate(prompt_columns(self._table)):
            place = f"{self._path}, row {index + 1}"
            try:
                prompt = _prompt(nothing | row, place)
            except ValueError as error:
                prompt = error
            yield Entry(index, place, prompt)

    def part(self, indices: Sequence[int], completed: Sequence[Completed]) -> bytes:
        """Return the rows at `indices`, with completions."""
        return parquet_bytes(with_completions(self._table.take(list(indices)), completed))


def open_prompts(path: Path) -> PromptFile:
    """Return the file at `path`, by its suffix.

    Raises:
        ValueError: the suffix is neither .jsonl nor .parquet; the file has no prompts, or is not what its suffix says.
        OSError: the file cannot be read.
    """
    kinds: dict[str, type[JsonLinesFile | ParquetFile]] = {".jsonl": JsonLinesFile, ".parquet": ParquetFile}
    if path.suffix not in kinds:
        raise ValueError(f"{path} ends in neither .jsonl nor .parquet; convert it, or rename it.")
    file = kinds[path.suffix](path)
    if next(file.entries(), None) is None:
        raise ValueError(f'{path} has no rows; write one, such as {{"prompt": "Hello"}}, for each prompt.')
    return file


def _prompt(columns: Mapping[str, Any], place: str) -> Prompt:
    """Return the prompt in a row.

    Raises:
        ValueError: there is not exactly one prompt, the conversation is invalid, or a column has the name of one of
            the output.
    """
    if taken := [name for name in COLUMNS if name in columns]:
        raise ValueError(f"{place} has a column {taken[0]!r}, which the output uses; rename it.")
    text, messages = columns.get("prompt"), columns.get("messages")
    if isinstance(text, str) and messages is None:
        return text
    if isinstance(messages, list) and text is None:
        check_conversation(conversation := cast(Sequence[Message], messages), place)
        return conversation
    raise ValueError(f"{place} has the columns {', '.join(columns) or 'none'}; {_EXPECTED}.")
