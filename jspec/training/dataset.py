"""The training data of a drafter: texts as token ids, and the tokens in them that it learns to draft."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from convert.errors import CheckpointError
from convert.to_hf import write_file
from jspec.text.chat_template import check_messages, rendered

TEXTS = "texts"  # holds the texts that the target wrote, in the folder of a training
_HELD_OUT = 20  # about one text in this many is held out


@dataclasses.dataclass(frozen=True)
class Row:
    """A text.

    Attributes:
        tokens: ``int32[S]``.
        learned: ``bool[S]``: the tokens to learn; in a chat, those of the assistant.
    """

    tokens: np.ndarray
    learned: np.ndarray

    @property
    def is_question(self) -> bool:
        """Whether the text ends where the assistant would answer, so that it has no tokens to learn yet."""
        return not self.learned.any()


def of_answer(prompt: Sequence[int], answer: Sequence[int]) -> Row:
    """Return a text whose first tokens are given."""
    learned = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Row(np.array([*prompt, *answer], np.int32), learned)


def read(file: str | Path, tokenizer: Any, length: int, room: int) -> list[Row]:
    """Read chats (``.jsonl``, an object with "messages" on every line) or plain text, in parts of `length` tokens.

    A chat that ends with the user's turn also gives a question, which stays whole and has at most `room` tokens. For
    the folder of an earlier training, read the texts that the target wrote there.

    Raises:
        ValueError: the file is empty or malformed, or a question is too long (with the number of the line). Or the
            file has chats, and there is no chat template.
        OSError: the file cannot be read.
    """
    file = Path(file)
    if file.is_dir():
        return written(file, length)
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text (byte {error.start}); convert it first.") from error
    if file.suffix == ".jsonl":
        found = [row for number, line in enumerate(content.split("\n"), 1) if line.strip()
                 for row in _chat(line, tokenizer, room, f"{file}, line {number}")]  # fmt: skip
    else:
        found = list(_pieces(content, tokenizer, length))
    rows = [part for row in found for part in ([row] if row.is_question else parts(row, length))]
    if not rows:
        raise ValueError(f"{file} has no text to learn from; give at least one that has more than a token.")
    return rows


def written(folder: Path, length: int) -> list[Row]:
    """Return the texts that the target wrote in the folder of an earlier training, in parts of `length` tokens.

    Raises:
        ValueError: there are no texts, or they are damaged.
    """
    files = sorted((folder / TEXTS).glob("*.safetensors"))
    found = [part for file in files for row in load(file) for part in parts(row, length)]
    if not found:
        raise ValueError(f"{folder} has no texts that a target wrote; give a file, or the folder of a training that "
                         "wrote some.")  # fmt: skip
    return found


def rounds_in(folder: Path) -> int:
    """Return the number after that of the last writing round in the folder of a training; 0 for anything else."""
    return max((int(file.stem) + 1 for file in (folder / TEXTS).glob("*.safetensors") if file.stem.isdecimal()),
               default=0)  # fmt: skip


def _pieces(content: str, tokenizer: Any, length: int) -> Iterator[Row]:
    """Yield a text in pieces, each after the token that starts a text, if the tokenizer puts one there (BOS)."""
    ids, bare = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (content, "a"))
    whole = tokenizer("a", verbose=False)["input_ids"]
    given = whole[: len(whole) - len(bare)] if whole[len(whole) - len(bare) :] == bare else []
    size = length - len(given)
    for first in range(0, len(ids), size):
        # The BOS counts as learned, because a text's first token is never drafted. If it counted as given, it would
        # be a question, the same for all pieces, and none of them could be held out.
        yield of_answer((), [*given, *ids[first : first + size]])


def parts(row: Row, length: int) -> Iterator[Row]:
    """Yield a row in parts of at most `length` tokens, without parts that teach nothing."""
    for start in range(0, len(row.tokens), length):
        part = slice(start, start + length)
        if row.learned[part][2:].any():  # the first token that can be drafted is the third
            yield Row(row.tokens[part], row.learned[part])


def divide(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return training rows and held-out rows. About one row in twenty, and at least one, is held out.

    The choice depends on a row's question, or on the row itself if it has none, and not on the other rows. So another
    training with additional data holds out the same rows.

    Raises:
        ValueError: there are fewer than two texts.
    """
    keys = [(row.tokens[: row.learned.argmax()] if row.learned.argmax() else row.tokens).tobytes() for row in rows]
    lots = {key: int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64 for key in keys}
    if len(lots) < 2:
        raise ValueError(f"There is {len(lots)} text to learn from, and one must be held out; give at least 2.")
    apart = {key for key, lot in lots.items() if lot < 1 / _HELD_OUT}
    if not 0 < len(apart) < len(lots):  # may happen with few texts
        apart = {min(lots, key=lots.__getitem__)}
    train, held_out = (
        [row for row, key in zip(rows, keys, strict=True) if (key in apart) is out] for out in (False, True)
    )
    return train, held_out


def save(rows: Iterable[Row], file: Path) -> None:
    """Write rows to a file as they are."""
    rows = list(rows)
    none = Row(np.zeros(0, np.int32), np.zeros(0, bool))
    write_arrays(file, {"tokens": np.concatenate([row.tokens for row in (none, *rows)]),
                        "learned": np.concatenate([row.learned for row in (none, *rows)]),
                        "lengths": np.array([len(row.tokens) for row in rows], np.int64)})  # fmt: skip


def load(file: Path) -> list[Row]:
    """Return the rows that `save` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        arrays = load_file(file)
        ends = np.cumsum(arrays["lengths"])[:-1]
        parts = np.split(arrays["tokens"], ends), np.split(arrays["learned"], ends)
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete it, and its texts are written anew.") from error
    return [Row(*part) for part in zip(*parts, strict=True)] if len(arrays["lengths"]) else []


def digest(rows: Iterable[Row]) -> str:
    """Return a hash that two lists of rows have in common only if they are equal."""
    found = hashlib.sha256()
    for row in rows:
        for part in (np.int64(len(row.tokens)), row.tokens, row.learned):
            found.update(part.tobytes())
    return found.hexdigest()


def write_arrays(file: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a safetensors file whole or not at all.

    Raises:
        convert.CheckpointError: the disk is full.
    """
    partial = file.with_suffix(".partial")
    try:
        write_file(partial, arrays, None)
    except CheckpointError:
        partial.unlink(missing_ok=True)
        raise
    partial.rename(file)


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def frequent(rows: Iterable[Row], count: int, vocab_size: int) -> np.ndarray:
    """Return the `count` tokens that are learned most often, ``int64[count]`` in ascending order."""
    seen = np.zeros(vocab_size, np.int64)
    for row in rows:
        np.add.at(seen, row.tokens[row.learned], 1)
    return np.sort(np.argsort(-seen, kind="stable")[:count])


def _chat(line: str, tokenizer: Any, room: int, place: str) -> list[Row]:
    """Return a conversation, of which the assistant's turns are learned, and a question if the user's turn ends it.

    Some templates show a turn differently if others follow (some leave out thoughts). Only the tokens up to the first
    difference are learned.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{place} is no JSON ({what}); expected an object with a list of messages.") from error
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        raise ValueError(f'{place} has no list "messages"; expected an object like {{"messages": [...]}}.')
    roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
    turns = [i for i, role in enumerate(roles) if role == "assistant"]
    if not turns and roles[-1:] != ["user"]:
        raise ValueError(f"{place} has no message of the assistant, and does not end with one of the user, for the "
                         "target to answer; there is nothing to learn from it.")  # fmt: skip
    if roles[0] == "assistant":
        raise ValueError(f"{place} begins with the assistant; begin with what it answers.")
    if tokenizer.chat_template is None:
        raise ValueError(f"{place} is a chat, and the target has no chat template; give plain text instead.")

    check_messages(messages, place)

    def ids(upto: int, asked: bool) -> list[int]:
        text = rendered(tokenizer, messages[:upto], place, asked)
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    found: list[Row] = []
    if roles[-1] == "user":
        found.append(of_answer(ids(len(messages), True), ()))
        if (size := len(found[0].tokens)) > room:
            raise ValueError(f"{place} asks in {size} tokens, and for an answer the target has room behind {room}; "
                             "leave it out or shorten it.")  # fmt: skip
    if not turns:
        return found
    tokens = np.array(ids(turns[-1] + 1, False), np.int32)
    learned = np.zeros(len(tokens), bool)
    for i in turns:
        if roles[i - 1] == "assistant":
            raise ValueError(f"{place} has two messages of the assistant in a row; give what it answers between them.")
        start, end = (_num_alike(tokens, shown) for shown in (ids(i, True), ids(i + 1, False)))
        # The tokens that the template puts after the end of a turn are never generated.
        ends = np.flatnonzero(tokens[start:end] == tokenizer.eos_token_id)
        learned[start : start + int(ends[-1]) + 1 if ends.size else end] = True
    if not learned.any():
        raise ValueError(f"{place} has no token that the assistant says; there is nothing to learn from it.")
    return [Row(tokens, learned), *found]


def _num_alike(tokens: np.ndarray, ids: Sequence[int]) -> int:
    """Return how many of the first `ids` the tokens begin with."""
    size = min(len(tokens), len(ids))
    other = np.flatnonzero(tokens[:size] != np.array(ids[:size]))
    return int(other[0]) if other.size else size
