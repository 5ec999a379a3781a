"""Typed access to the fields of a parsed config.json, in which `null` counts as missing."""

import math
from typing import cast

from convert.errors import CheckpointError
from convert.json_file import Json

Fields = dict[str, Json]
_FIX = "as in the model's own config.json"


def _required(raw: Fields, key: str, default: Json, expected: str) -> Json:
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise CheckpointError(f"{key} is missing; expected {expected}, {_FIX}.")
    return value


def integer(raw: Fields, key: str, default: int | None = None) -> int:
    """Return a positive integer. Raise CheckpointError for anything else, such as true or 4096.0."""
    value = _required(raw, key, default, "a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key} is {value!r}; expected a positive integer, {_FIX}.")
    return value


def number(raw: Fields, key: str, default: float | None = None) -> float:
    """Return a positive finite number. Raise CheckpointError for anything else."""
    value = _required(raw, key, default, "a positive number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{key} is {value!r}; expected a positive number, {_FIX}.")
    return float(value)


def flag(raw: Fields, key: str, default: bool = False) -> bool:
    """Return true or false. Raise CheckpointError for anything else."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}; expected true or false, {_FIX}.")
    return value


def ascending_ids(raw: Fields, key: str, least: int = 0) -> list[int]:
    """Return a list of distinct layers in ascending order, none below `least`. Raise CheckpointError for others."""
    ids = raw[key]
    whole = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) and i >= least for i in ids)
    if not whole or sorted(set(cast("list[int]", ids))) != ids:
        raise CheckpointError(
            f"{key} is {ids!r}; expected distinct layers in ascending order, as they are read: restore the head's own "
            "config.json."
        )
    return cast("list[int]", ids)


def token_ids(raw: Fields, key: str) -> tuple[int, ...]:
    """Return the ids of a field that holds an id, a list of ids or null. Raise CheckpointError for anything else."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise CheckpointError(f"{key} is {value!r}; expected a token id, a list of token ids or null.")
    return tuple(cast("list[int]", ids))
