"""Access to the fields of a quantisation section in config.json."""

import reprlib
from typing import cast

from convert.errors import CheckpointError
from convert.json_fields import Fields, integer
from convert.json_file import Json


def one_of(raw: Fields, key: str, supported: tuple[Json, ...], default: Json = None) -> Json:
    """Return a field's value. Raise CheckpointError if the value is not in `supported`. Null counts as missing."""
    value = default if raw.get(key) is None else raw[key]
    value = value.lower() if isinstance(value, str) else value
    if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in supported):
        known = ", ".join(map(repr, supported))
        raise CheckpointError(
            f"{key} is {reprlib.repr(value)}; only {known} can be read, so choose another checkpoint."
        )
    return value


def group_size(raw: Fields, default: int | None = None) -> int | None:
    """Return the number of columns that share a scale, or None if each row has one scale (written as -1)."""
    value = raw.get("group_size")
    return None if value == -1 and isinstance(value, int) else integer(raw, "group_size", default)


def absent(raw: Fields, *keys: str) -> None:
    """Raise CheckpointError unless each of `keys` is missing, null, false or empty."""
    for key in keys:
        if raw.get(key):
            raise CheckpointError(
                f"{key} is set, which changes the weights and is not supported; choose another checkpoint."
            )


def names(raw: Fields, key: str) -> frozenset[str]:
    """Return a list of names as a set. Raise CheckpointError for anything else."""
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"{key} is {reprlib.repr(value)}; expected a list of module names, as in the model's own config.json."
        )
    return frozenset(cast("list[str]", value))


def check_multiple(count: int, unit: int, what: str) -> None:
    """Raise CheckpointError unless `count` is a multiple of `unit`."""
    if count % unit:
        raise CheckpointError(f"{count} {what} of {unit}; restore the model's own config.json.")
