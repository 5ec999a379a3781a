"""Draft vocabularies that are a subset of the target's: the tables `d2t` and `t2d` in a head's files."""

from collections.abc import Collection
from pathlib import Path

import numpy as np

from convert.errors import CheckpointError
from convert.json_fields import Fields, integer
from convert.safetensors_reader import Tensor

# "d2t": the target's token id for each row of the head, minus the row's index. "t2d": whether a target token has a row.
TARGET_IDS, KNOWN = "d2t", "t2d"
TABLES = {TARGET_IDS: "I64", KNOWN: "BOOL"}
_FIX = "restore the head's own file"


def size(raw: Fields, vocab_size: int, names: Collection[str]) -> int | None:
    """Return D from the content of config.json; None if all tokens can be drafted and there is no table `d2t`.

    Raises:
        CheckpointError: D is larger than the vocabulary.
    """
    count = integer(raw, "draft_vocab_size", vocab_size)
    if count > vocab_size:
        raise CheckpointError(
            f"draft_vocab_size {count} is more than vocab_size {vocab_size}; restore the head's own config.json."
        )
    return count if count < vocab_size or TARGET_IDS in names else None


def shapes(count: int | None, vocab_size: int, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `d2t`, required if the vocabulary is reduced, and of `t2d`, which is optional."""
    if count is None:
        return {}
    return {TARGET_IDS: (count,)} | ({KNOWN: (vocab_size,)} if KNOWN in names else {})


def take(found: dict[str, Tensor], vocab_size: int, directory: Path) -> np.ndarray | None:
    """Remove the tables from the tensors of `directory`, and return their `draft_ids`; None if there are none.

    Raises:
        CheckpointError: the tables are invalid.
    """
    tables = {name: found.pop(name).read(slice(None)) for name in TABLES if name in found}
    if TARGET_IDS not in tables:
        return None
    try:
        return draft_ids(tables[TARGET_IDS], tables.get(KNOWN), vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def draft_ids(offsets: np.ndarray, known: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """Return ``int32[V]``: each target token's index among the D tokens that the head can draft, or D for other tokens.

    Args:
        offsets: ``int64[D]`` ("d2t"): the target's token id for each row of the head, minus the row's index.
        known: ``bool[V]`` ("t2d"): whether the head can draft each of the target's tokens.

    Raises:
        CheckpointError: a token is outside the vocabulary or named twice, or the tables disagree.
    """
    count = len(offsets)
    tokens = offsets + np.arange(count)
    out_of_vocab = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
    if out_of_vocab.size:
        row = out_of_vocab[0]
        raise CheckpointError(
            f"d2t names token {tokens[row]} in row {row}; the target's tokens are 0 to {vocab_size - 1}: {_FIX}."
        )
    found = np.full(vocab_size, count, np.int32)
    found[tokens] = np.arange(count)
    twice = np.flatnonzero(found[tokens] != np.arange(count))
    if twice.size:
        raise CheckpointError(
            f"d2t names token {tokens[twice[0]]} in two rows; each row must have its own token: {_FIX}."
        )
    if known is not None and not np.array_equal(known, found < count):
        token = np.flatnonzero(known != (found < count))[0]
        raise CheckpointError(
            f"t2d and d2t disagree about token {token}; both must name the same {count} tokens: {_FIX}."
        )
    return found


def tables(draft_ids: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``(d2t int64[D], t2d bool[V])``, the inverse of the function `draft_ids`."""
    known = draft_ids < count
    tokens = np.zeros(count, np.int64)
    tokens[draft_ids[known]] = np.flatnonzero(known)
    return tokens - np.arange(count), known
