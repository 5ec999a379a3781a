"""Files of prompts, in JSON Lines or Parquet, and the files that repeat their rows with the completions."""

import codecs
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from jspec.cluster.batch.arrow_tables import parquet_bytes, prompt_columns, read_parquet, rows_at, with_completions
from jspec.cluster.batch.completed import COLUMNS, Completed
from jspec.text.chat_template import Message, Prompt, check_conversation
from jspec.text.json_lines import parse_object

_PROMPT, _MESSAGES = "prompt", "messages"


class Entry(NamedTuple):
    """A prompt and its place in the file.

    Attributes:
        prompt_index: the number of prompts before it.
        place: the line or row, for error messages.
        prompt: the prompt, or the error if the row has no valid prompt.
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
        """Return a file with the rows at `indices`, in ascending order, each with its completion."""
        ...


class JsonLinesFile:
    """A file with one JSON object per line. Blank lines are ignored."""

    suffix = ".jsonl"

    def __init__(self, path: Path):
        numbered = enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n"), 1)
        self._lines = [(f"{path}, line {number}", line.strip()) for number, line in numbered if line.strip()]

    def entries(self) -> Iterator[Entry]:
        """Yield the entries in order."""
        for index, (place, line) in enumerate(self._lines):
            try:
                columns = parse_object(line, place)
                check_columns(columns, place)
                prompt = prompt_of(columns, place)
            except ValueError as error:
                prompt = error
            yield Entry(index, place, prompt)

    def part(self, indices: Sequence[int], completed: Sequence[Completed]) -> bytes:
        """Return the lines at `indices`, with completions. The original text of each line is kept."""
        lines = (self._lines[i][1].removesuffix(b"}").rstrip() for i in indices)
        added = (json.dumps(one, ensure_ascii=False).removeprefix("{").encode() for one in completed)
        return b"".join(b"%s, %s\n" % pair for pair in zip(lines, added, strict=True))


class ParquetFile:
    """A Parquet file with a column "prompt" or "messages"."""

    suffix = ".parquet"

    def __init__(self, path: Path):
        self._table, self._path = read_parquet(path), path
        check_columns(self._table.column_names, str(path))

    def entries(self) -> Iterator[Entry]:
        """Yield the entries in order."""
        for index, row in enumerate(prompt_columns(self._table)):
            place = f"{self._path}, row {index + 1}"
            try:
                prompt = prompt_of(row, place)
            except ValueError as error:
                prompt = error
            yield Entry(index, place, prompt)

    def part(self, indices: Sequence[int], completed: Sequence[Completed]) -> bytes:
        """Return the rows at `indices`, with completions."""
        return parquet_bytes(with_completions(rows_at(self._table, indices), completed))


def open_prompts(path: Path) -> PromptFile:
    """Open the file at `path`. Its suffix selects the format.

    Raises:
        ValueError: the suffix is neither .jsonl nor .parquet; the file has no rows or the wrong columns; or its content
            does not match its suffix.
        OSError: the file cannot be read.
    """
    kinds: dict[str, type[JsonLinesFile | ParquetFile]] = {".jsonl": JsonLinesFile, ".parquet": ParquetFile}
    if path.suffix not in kinds:
        raise ValueError(f"{path} ends in neither .jsonl nor .parquet; convert it, or rename it.")
    file = kinds[path.suffix](path)
    if next(file.entries(), None) is None:
        raise ValueError(f"{path} has no rows; write one row with a 'prompt' or 'messages' for each prompt.")
    return file


def check_columns(names: Sequence[str] | Mapping[str, object], place: str) -> None:
    """Check the names of a row's or a table's columns.

    Raises:
        ValueError: there is no column of prompts, or a column has the same name as one that the output adds.
    """
    if taken := [name for name in COLUMNS if name in names]:
        raise ValueError(f"{place} has a column {taken[0]!r}, which the output uses; rename it.")
    if _PROMPT not in names and _MESSAGES not in names:
        columns = f"the columns {', '.join(names)}" if names else "no columns"
        raise ValueError(f"{place} has {columns}; add a column 'prompt' or 'messages'.")


def prompt_of(columns: Mapping[str, object], place: str) -> Prompt:
    """Return the prompt in a row.

    Raises:
        ValueError: the row does not have exactly one prompt, or the conversation is invalid.
    """
    text, messages = columns.get(_PROMPT), columns.get(_MESSAGES)
    if isinstance(text, str) and messages is None:
        return text
    if isinstance(messages, list) and text is None:
        check_conversation(conversation := cast(Sequence[Message], messages), place)
        return conversation
    found = ", ".join(f"{name} = {reprlib.repr(columns[name])}" for name in (_PROMPT, _MESSAGES) if name in columns)
    raise ValueError(
        f"{place} has {found}; expected either 'prompt' (text) or 'messages' (a list of messages), not both."
    )
